#include "start.h"

#include "privilege.h"

#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define ARGUMENT_BYTES_MAX (128u * KIB) /* the kernel's bound of one argument, its final zero included */
#define CHILD_STACK_BYTES (32u * KIB)
#define SCRIPT_FD 3
#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

/* The script comes on descriptor 3, which is closed again before its first word runs. */
static char shell_path[] = "/bin/sh", shell_option[] = "-c", shell_reader[] = "eval \"$(cat <&3 3<&-)\" 3<&-";

static bool write_script(struct start *start, const uint8_t *text, size_t size)
{
	start->script_fd = memfd_create("script", MFD_CLOEXEC);
	if (start->script_fd < 0)
		return fault_set(&start->fault, "exec", errno, "a descriptor for the shell's program");
	for (size_t done = 0; done < size;) {
		ssize_t put = write(start->script_fd, text + done, size - done);
		if (put <= 0)
			return fault_set(&start->fault, "exec", errno, "a descriptor for the shell's program");
		done += (size_t)put;
	}
	(void)lseek(start->script_fd, 0, SEEK_SET);
	return true;
}

static bool has_name(char *const *environment, size_t count, const char *name)
{
	size_t length = strlen(name);
	for (size_t i = 0; i < count; i++)
		if (strncmp(environment[i], name, length) == 0 && environment[i][length] == '=')
			return true;
	return false;
}

static void add_identity(struct start *start, size_t count)
{
	const char *const names[3] = {"HOME", "USER", "LOGNAME"};
	const char *const values[3] = {start->identity.home, start->identity.name, start->identity.name};
	size_t given = count;
	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		if (has_name(start->envp, given, names[i]))
			continue;
		(void)snprintf(start->environment[i], sizeof start->environment[i], "%s=%s", names[i], values[i]);
		start->envp[count++] = start->environment[i];
	}
}

/* Points argv, envp, cwd and user into the frame. A field's end is marked by a zero written over the head of the next one, which
 * has been read by then; past the last one the buffer has a byte to spare. */
static bool read_fields(struct start *start, const struct frame *frame, struct field *shell, char **user, size_t *env_count)
{
	struct field field;
	size_t at = 0, args = 0;
	uint8_t *previous_end = NULL;
	while (frame_next(frame, &at, &field)) {
		char *text = (char *)field.data;
		if (previous_end != NULL)
			*previous_end = '\0';
		previous_end = field.data + field.size;
		bool is_text = field.tag == TAG_ARG || field.tag == TAG_SHELL || field.tag == TAG_ENV || field.tag == TAG_CWD ||
			       field.tag == TAG_USER;
		if (is_text && memchr(text, '\0', field.size) != NULL)
			return fault_set(&start->fault, "exec", EINVAL, "a zero byte in a text of EXEC");
		if (field.tag == TAG_ARG)
			start->argv[args++] = text;
		else if (field.tag == TAG_ENV)
			start->envp[(*env_count)++] = text;
		else if (field.tag == TAG_SHELL)
			*shell = field;
		else if (field.tag == TAG_CWD)
			start->cwd = text;
		else if (field.tag == TAG_USER)
			*user = text;
	}
	if (previous_end != NULL)
		*previous_end = '\0';
	if ((args == 0) == (shell->data == NULL))
		return fault_set(&start->fault, "exec", EINVAL, "EXEC needs either ARG or SHELL");
	return true;
}

/* What a program may open is also what it may use: a lower soft limit would be a bound that nobody asked for. */
static struct rlimit files_of(const struct house *house, const struct frame *frame)
{
	uint64_t wanted = frame_number(frame, TAG_OPEN_FILES, 0);
	if (wanted == 0)
		return house->files;
	rlim_t files = wanted < house->files.rlim_max ? (rlim_t)wanted : house->files.rlim_max;
	return (struct rlimit){.rlim_cur = files, .rlim_max = files};
}

bool start_prepare(struct start *start, const struct house *house, struct frame *frame)
{
	struct field field, shell = {0};
	size_t args = 0, env_count = 0;
	char *user = NULL;
	start->script_fd = -1;
	start->cwd = "/";
	start->files = files_of(house, frame);
	for (size_t at = 0; frame_next(frame, &at, &field);) {
		args += field.tag == TAG_ARG ? 1 : 0;
		env_count += field.tag == TAG_ENV ? 1 : 0;
	}
	start->argv = calloc(args + 1, sizeof *start->argv);
	start->envp = calloc(env_count + 4, sizeof *start->envp);
	if (start->argv == NULL || start->envp == NULL)
		return fault_set(&start->fault, "exec", ENOMEM, "argument lists");
	env_count = 0;
	if (!read_fields(start, frame, &shell, &user, &env_count))
		return false;
	if (shell.data != NULL) {
		bool fits = shell.size < ARGUMENT_BYTES_MAX;
		if (!fits && !write_script(start, shell.data, shell.size))
			return false;
		start->script_argv[0] = shell_path;
		start->script_argv[1] = shell_option;
		start->script_argv[2] = fits ? (char *)shell.data : shell_reader;
		free_pointer(&start->argv);
	}
	if (!privilege_identity(house, user, &start->identity, &start->fault))
		return false;
	add_identity(start, env_count);
	return true;
}

void start_free(struct start *start)
{
	free_pointer(&start->argv);
	free_pointer(&start->envp);
	close_fd(&start->script_fd);
}

/* What the child works on. It shares the keeper's memory until its exec, so a failure is simply written where the keeper reads. */
struct child {
	struct start *start;
	const struct house *house;
	const struct wiring *wiring;
	bool failed;
};

static int refuse(struct child *child, const char *what, const char *object)
{
	(void)fault_set(&child->start->fault, what, errno, "%s", object);
	child->failed = true;
	_exit(127);
}

static void raise_oom_score(void)
{
	int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	(void)!write(fd, "500", 3); /* a sandbox that runs out of memory loses commands, not its guest */
	(void)close(fd);
}

static bool wire(const struct child *child)
{
	const struct wiring *wiring = child->wiring;
	bool terminal = wiring->master_fd >= 0;
	if (terminal && ioctl(wiring->stdin_fd, TIOCSCTTY, 0) != 0)
		return false;
	if (dup2(wiring->stdin_fd, 0) < 0 || dup2(wiring->stdout_fd, 1) < 0 || dup2(wiring->stderr_fd, 2) < 0)
		return false;
	int script_fd = child->start->script_fd;
	if (script_fd < 0)
		return privilege_close_from(3);
	if (script_fd == SCRIPT_FD ? fcntl(SCRIPT_FD, F_SETFD, 0) != 0 : dup2(script_fd, SCRIPT_FD) < 0)
		return false;
	return privilege_close_from(SCRIPT_FD + 1);
}

static const char *search_path(char *const *environment)
{
	for (; *environment != NULL; environment++)
		if (strncmp(*environment, "PATH=", 5) == 0)
			return *environment + 5;
	return DEFAULT_PATH;
}

/* The kernel says of a directory what it says of a file that may not be run. */
static void try_program(const char *path, char *const *argv, char *const *environment)
{
	struct stat what;
	(void)execve(path, argv, environment);
	if (errno == EACCES) {
		bool directory = stat(path, &what) == 0 && S_ISDIR(what.st_mode);
		errno = directory ? EISDIR : EACCES;
	}
}

/* Comes back only when no candidate could be run, with the reason that says most. */
static void run_program(char *const *argv, char *const *environment)
{
	char path[PATH_MAX];
	const char *name = argv[0];
	int reason = ENOENT;
	if (strchr(name, '/') != NULL || *name == '\0') {
		try_program(name, argv, environment);
		return;
	}
	for (const char *place = search_path(environment); place != NULL;) {
		size_t length = strcspn(place, ":");
		int size = snprintf(path, sizeof path, "%.*s%s%s", (int)length, place, length > 0 ? "/" : "", name);
		if (size > 0 && (size_t)size < sizeof path)
			(void)execve(path, argv, environment);
		else
			errno = ENAMETOOLONG;
		if (errno == EACCES)
			reason = EACCES;
		else if (errno != ENOENT && errno != ENOTDIR)
			return;
		place = place[length] == ':' ? place + length + 1 : NULL;
	}
	errno = reason;
}

static int child_main(void *argument)
{
	struct child *child = argument;
	struct start *start = child->start;
	char *const *argv = start->argv != NULL ? start->argv : start->script_argv;
	sigset_t none;
	(void)setsid();
	raise_oom_score();
	(void)setrlimit(RLIMIT_NOFILE, &start->files);
	if (!wire(child))
		return refuse(child, "pipe", "descriptors of the command");
	if (!privilege_become(child->house, &start->identity))
		return refuse(child, "user", start->identity.name);
	if (chdir(start->cwd) != 0)
		return refuse(child, "cwd", start->cwd);
	(void)sigemptyset(&none);
	(void)sigprocmask(SIG_SETMASK, &none, NULL);
	run_program(argv, start->envp);
	return refuse(child, "exec", argv[0]);
}

pid_t start_process(struct start *start, const struct house *house, const struct wiring *wiring)
{
	static _Alignas(16) char stack[CHILD_STACK_BYTES];
	struct child child = {.start = start, .house = house, .wiring = wiring};
	/* As vfork, with a stack of its own: no page tables to copy, and the keeper sleeps until the exec has worked or failed. */
	pid_t pid = clone(child_main, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, &child);
	if (pid < 0) {
		(void)fault_set(&start->fault, "fork", errno, "the command's first process");
		return -1;
	}
	if (!child.failed)
		return pid;
	(void)waitpid(pid, NULL, 0);
	return -1;
}
