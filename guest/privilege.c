#include "privilege.h"

#include <limits.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define CAPABILITY_VERSION 0x20080522u

/* As in linux/capability.h, which musl's compiler wrapper does not see. */
struct capability_header {
	uint32_t version;
	int32_t pid;
};

struct capability_set {
	uint32_t effective, permitted, inheritable;
};

static bool capabilities_get(struct capability_set sets[2])
{
	struct capability_header header = {.version = CAPABILITY_VERSION};
	return syscall(SYS_capget, &header, sets) == 0;
}

static bool capabilities_set(const struct capability_set sets[2])
{
	struct capability_header header = {.version = CAPABILITY_VERSION};
	return syscall(SYS_capset, &header, sets) == 0;
}

bool privilege_drop_to(uid_t uid, struct fault *fault)
{
	struct capability_set sets[2];
	if (!capabilities_get(sets) || prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) != 0)
		return fault_set(fault, "user", errno, "keep capabilities");
	/* Denied in a user namespace whose maker had no rights; the groups are then none of ours to lose. */
	if (syscall(SYS_setgroups, 0, NULL) != 0 && errno != EPERM)
		return fault_set(fault, "user", errno, "setgroups");
	if (syscall(SYS_setresgid, uid, uid, uid) != 0 || syscall(SYS_setresuid, uid, uid, uid) != 0)
		return fault_set(fault, "user", errno, "become uid %u", uid);
	for (size_t i = 0; i < 2; i++) {
		sets[i].effective = sets[i].permitted;
		sets[i].inheritable = 0; /* and with it the ambient ones: a command's user must not get them by exec */
	}
	if (!capabilities_set(sets) || prctl(PR_SET_KEEPCAPS, 0, 0, 0, 0) != 0)
		return fault_set(fault, "user", errno, "set capabilities");
	return true;
}

bool privilege_identity(const struct house *house, const char *user, struct identity *identity, struct fault *fault)
{
	char own[16];
	if (user == NULL || *user == '\0') {
		if (house->changes_user) {
			*identity = (struct identity){.name = "root", .home = "/root"};
			return true;
		}
		(void)snprintf(own, sizeof own, "%u", house->own_uid);
		user = own;
	}
	if (!user_find(user, identity, fault))
		return false;
	if (house->changes_user && identity->uid == house->own_uid && house->own_uid != 0)
		return fault_set(fault, "user", EPERM, "uid %u is the guest's own", identity->uid);
	if (!house->changes_user && identity->uid != house->own_uid)
		return fault_set(fault, "user", EPERM, "this guest has no right to become %.64s", user);
	return true;
}

bool privilege_become(const struct house *house, const struct identity *identity)
{
	static const struct capability_set nothing[2];
	gid_t gid = identity->gid;
	if (!house->changes_user)
		return true;
	if (syscall(SYS_setgroups, identity->group_count, identity->groups) != 0 && (errno != EPERM || identity->uid != 0))
		return false;
	if (syscall(SYS_setresgid, gid, gid, gid) != 0)
		return false;
	if (syscall(SYS_setresuid, identity->uid, identity->uid, identity->uid) != 0)
		return false;
	/* From one plain uid to another the kernel takes nothing away by itself. */
	return identity->uid == 0 || capabilities_set(nothing);
}

static bool close_range_of(unsigned first, unsigned last)
{
#ifdef GUEST_KEEPS_DESCRIPTORS /* for a test that shows what this is good for */
	return true;
#endif
	return first > last || syscall(SYS_close_range, first, last, 0) == 0;
}

bool privilege_close_from(int first)
{
	return close_range_of((unsigned)first, UINT_MAX);
}

bool privilege_close_others(const int *keep, size_t count)
{
	unsigned next = 3;
	for (;;) {
		unsigned nearest = UINT_MAX;
		for (size_t i = 0; i < count; i++)
			if (keep[i] >= (int)next && (unsigned)keep[i] < nearest)
				nearest = (unsigned)keep[i];
		if (nearest == UINT_MAX)
			return close_range_of(next, UINT_MAX);
		if (nearest > next && !close_range_of(next, nearest - 1))
			return false;
		next = nearest + 1;
	}
}
