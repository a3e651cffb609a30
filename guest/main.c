/* The guest: PID 1 of a sandbox, or a plain process that plays that part where there is no root.
 *
 *   guest --listen FD [--uid UID]
 *
 * FD is a listening Unix stream socket that was bound outside the sandbox. Once it runs it never exits by itself: what goes wrong is an
 * answer on the connection (docs/guest-protocol.md). Only the way to the loop may fail, on stderr and with status 1. */
#include "guest.h"

#include "ownuid.h"
#include "privilege.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/syscall.h>

#define FDS_OWN 32u	   /* that the guest needs besides those of commands */
#define FDS_A_COMMAND 4u   /* channel, stdin, stdout, stderr */
#define FDS_WHILE_STARTING 4u
#define SIGNALS 64 /* that the kernel has */
#ifndef GUEST_DUMPABLE
#define GUEST_DUMPABLE 0
#endif
#ifdef GUEST_KEEPS_DESCRIPTORS
#define LISTENER_DUPLICATE F_DUPFD
#else
#define LISTENER_DUPLICATE F_DUPFD_CLOEXEC
#endif

static struct guest guest;

_Noreturn static void die(const char *what, int error)
{
	(void)fprintf(stderr, "guest: %s: %s\n", what, strerror(error));
	_exit(1);
}

static bool parse_number(const char *text, unsigned *value)
{
	char *end = NULL;
	errno = 0;
	unsigned long number = strtoul(text, &end, 10);
	*value = (unsigned)number;
	return errno == 0 && end != text && *end == '\0' && number < INT32_MAX;
}

static void parse_arguments(int count, char **arguments, unsigned *listen_fd, unsigned *uid)
{
	bool listens = false;
	*uid = UINT32_MAX;
	for (int i = 1; i < count; i += 2) {
		bool has_value = i + 1 < count;
		if (has_value && strcmp(arguments[i], "--listen") == 0 && parse_number(arguments[i + 1], listen_fd))
			listens = true;
		else if (!has_value || strcmp(arguments[i], "--uid") != 0 || !parse_number(arguments[i + 1], uid))
			die("usage: guest --listen FD [--uid UID]", EINVAL);
	}
	if (!listens)
		die("usage: guest --listen FD [--uid UID]", EINVAL);
}

/* Every signal blocked, and at its default for the commands to come: a signal that is ignored would stay so through their exec.
 * By the system call, since a libc keeps 32 to 34 to itself, and whoever was started by posix_spawn may have them ignored. */
static void set_signals(bool first)
{
	static const unsigned long at_default[8]; /* the kernel's struct sigaction, all zero: SIG_DFL */
	sigset_t all, wanted;
	for (int number = 1; number < NSIG; number++)
		if (number != SIGKILL && number != SIGSTOP)
			(void)syscall(SYS_rt_sigaction, number, at_default, NULL, 8ul);
	(void)sigfillset(&all);
	if (sigprocmask(SIG_SETMASK, &all, NULL) != 0)
		die("block signals", errno);
	(void)sigemptyset(&wanted);
	(void)sigaddset(&wanted, SIGCHLD);
	if (!first) {
		(void)sigaddset(&wanted, SIGTERM);
		(void)sigaddset(&wanted, SIGINT);
	}
	guest.signal_fd = signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK);
	if (guest.signal_fd < 0)
		die("signalfd", errno);
}

/* Four descriptors a command and 256 commands are more than the usual limit of 1024. */
static void raise_file_limit(void)
{
	struct rlimit limit = {0};
	if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
		die("read the limit of open files", errno);
	guest.house.files = limit;
	limit.rlim_cur = limit.rlim_max;
	if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
		limit.rlim_cur = guest.house.files.rlim_cur;
	rlim_t room = limit.rlim_cur > FDS_OWN + FDS_WHILE_STARTING ? limit.rlim_cur - FDS_OWN - FDS_WHILE_STARTING : 0;
	guest.commands_max = room / FDS_A_COMMAND < COMMANDS_MAX ? (unsigned)(room / FDS_A_COMMAND) : COMMANDS_MAX;
	if (guest.commands_max == 0)
		die("the limit of open files leaves room for no command", EMFILE);
}

static void open_descriptors(int listen_fd)
{
	if (!privilege_close_others(&listen_fd, 1))
		die("close inherited descriptors", errno);
	guest.listen_fd = fcntl(listen_fd, LISTENER_DUPLICATE, 3); /* at least 3, whatever number it came with */
	if (guest.listen_fd < 0 || fcntl(guest.listen_fd, F_SETFL, O_NONBLOCK) != 0)
		die("the listening socket", errno);
	(void)close(listen_fd);
	guest.house.null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	if (guest.house.null_fd < 0)
		die("/dev/null", errno);
	guest.house.proc_fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (guest.house.proc_fd < 0)
		die("/proc", errno);
	guest.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (guest.epoll_fd < 0)
		die("epoll", errno);
}

static void become(unsigned uid)
{
	struct fault fault = {0};
	guest.house.changes_user = uid != UINT32_MAX || getuid() == 0;
	if (uid != UINT32_MAX && !privilege_drop_to(uid, &fault))
		die(fault.text, fault.error);
#ifndef GUEST_SHARES_UID
	if (uid != UINT32_MAX && uid != 0 && !ownuid_reserve(uid, &fault))
		die(fault.text, fault.error);
#endif
	guest.house.own_uid = getuid();
	/* After the change of user, which sets it anew. */
	if (prctl(PR_SET_DUMPABLE, GUEST_DUMPABLE, 0, 0, 0) != 0)
		die("become undumpable", errno);
}

static void silence(void)
{
	for (int fd = 0; fd <= 2; fd++)
		if (dup2(guest.house.null_fd, fd) < 0)
			die("close the standard streams", errno);
}

int main(int count, char **arguments)
{
	unsigned listen_fd = 0, uid = 0;
	guest.self = getpid();
	for (unsigned i = 0; i < CONNECTIONS_MAX; i++)
		guest.connections[i].fd = -1;
	parse_arguments(count, arguments, &listen_fd, &uid);
	(void)prctl(PR_SET_NAME, "guest", 0, 0, 0); /* else it goes by the number of the descriptor it was run from */
	(void)umask(022);
	(void)setsid(); /* fails for a leader, which has what it asks for */
	if (chdir("/") != 0)
		die("chdir /", errno);
	raise_file_limit();
	open_descriptors((int)listen_fd);
	set_signals(guest.self == 1);
	become(uid);
	if (guest.self != 1 && prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0)
		die("become a sub-reaper", errno);
	if (!loop_watch(&guest, guest.listen_fd, EPOLLIN, SOURCE_LISTENER, 0) ||
	    !loop_watch(&guest, guest.signal_fd, EPOLLIN, SOURCE_CHILDREN, 0))
		die("watch", errno);
	silence();
	loop_run(&guest);
}
