#include "ownuid.h"

#include <sys/prctl.h>
#include <sys/syscall.h>

/* Of linux/filter.h, linux/seccomp.h and linux/audit.h, which musl's compiler wrapper does not see. */
struct step {
	uint16_t code;
	uint8_t so, not_so; /* steps to skip */
	uint32_t value;
};

struct program {
	uint16_t count;
	const struct step *steps;
};

#define SECCOMP_FILTER 1u /* of seccomp(2): SECCOMP_SET_MODE_FILTER */
#define LOAD 0x20u
#define AND 0x54u
#define IF_EQUAL 0x15u
#define GIVE 0x06u
#define ALLOW 0x7fff0000u
#define REFUSE (0x00050000u | EPERM)
#define AT_CALL 0u
#define AT_ARCHITECTURE 4u
#define AT_ARGUMENT(index) (16u + 8u * (index)) /* its lower half: only little-endian machines are known here */
#define UIDS_MASK 0xffffu			/* a sandbox has 65,536 uids, and calls of the past take 16 bits */

/* The 64-bit architecture of this guest, and the numbers of its calls. */
#if defined(__x86_64__)
#define ARCHITECTURE 0xc000003eu
#elif defined(__aarch64__)
#define ARCHITECTURE 0xc00000b7u
#elif defined(__riscv)
#define ARCHITECTURE 0xc00000f3u
#else
#error "tell the number of this architecture, of linux/audit.h"
#endif

/* Calls of 32-bit programs have the same numbers on x86 and ARM; there are two of each, for uids of 16 and of 32 bits. */
enum { OLD_SETUID = 23, OLD_SETREUID = 70, OLD_SETFSUID = 138, OLD_SETRESUID = 164 };
enum { NEW_SETREUID = 203, NEW_SETRESUID = 208, NEW_SETUID = 213, NEW_SETFSUID = 215 };

bool ownuid_reserve(uid_t uid, struct fault *fault)
{
	const uint32_t own = uid & UIDS_MASK;
	/* Jumps are counted from the step that follows. THIRD, SECOND and FIRST look at that argument and at those before it. */
	const struct step steps[] = {
		{LOAD, 0, 0, AT_ARCHITECTURE},
		{IF_EQUAL, 0, 6, ARCHITECTURE},
		{LOAD, 0, 0, AT_CALL},
		{IF_EQUAL, 13, 0, SYS_setresuid},
		{IF_EQUAL, 15, 0, SYS_setreuid},
		{IF_EQUAL, 17, 0, SYS_setuid},
		{IF_EQUAL, 16, 0, SYS_setfsuid},
		{GIVE, 0, 0, ALLOW},
		{LOAD, 0, 0, AT_CALL},
		{IF_EQUAL, 7, 0, OLD_SETRESUID},
		{IF_EQUAL, 6, 0, NEW_SETRESUID},
		{IF_EQUAL, 8, 0, OLD_SETREUID},
		{IF_EQUAL, 7, 0, NEW_SETREUID},
		{IF_EQUAL, 9, 0, OLD_SETUID},
		{IF_EQUAL, 8, 0, NEW_SETUID},
		{IF_EQUAL, 7, 0, OLD_SETFSUID},
		{IF_EQUAL, 6, 9, NEW_SETFSUID},
		{LOAD, 0, 0, AT_ARGUMENT(2)}, /* THIRD */
		{AND, 0, 0, UIDS_MASK},
		{IF_EQUAL, 7, 0, own},
		{LOAD, 0, 0, AT_ARGUMENT(1)}, /* SECOND */
		{AND, 0, 0, UIDS_MASK},
		{IF_EQUAL, 4, 0, own},
		{LOAD, 0, 0, AT_ARGUMENT(0)}, /* FIRST */
		{AND, 0, 0, UIDS_MASK},
		{IF_EQUAL, 1, 0, own},
		{GIVE, 0, 0, ALLOW},
		{GIVE, 0, 0, REFUSE},
	};
	const struct program program = {.count = ARRAY_SIZE(steps), .steps = steps};
	if (syscall(SYS_seccomp, SECCOMP_FILTER, 0u, &program) != 0)
		return fault_set(fault, "user", errno, "keep uid %u to the guest", uid);
	return true;
}
