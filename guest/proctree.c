#include "proctree.h"

#include "util.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>

#define STOP_ROUNDS_MAX 8

struct process {
	pid_t pid, parent;
	char state;
	bool chosen;
};

struct processes {
	struct process *items;
	size_t count, size;
};

static void free_processes(struct processes *processes)
{
	free(processes->items);
}

/* linux_dirent64, which no libc header declares. */
struct entry {
	uint64_t inode;
	int64_t next;
	uint16_t size;
	uint8_t type;
	char name[];
};

/* The text after the name of the program, which may hold spaces and brackets; NULL when the process is gone. */
static const char *read_stat(int proc_fd, const char *name, char *text, size_t size)
{
	char path[32];
	(void)snprintf(path, sizeof path, "%.16s/stat", name);
	cleanup_fd int fd = openat(proc_fd, path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return NULL;
	ssize_t got = read(fd, text, size - 1);
	if (got <= 0)
		return NULL;
	text[got] = '\0';
	const char *end = strrchr(text, ')');
	return end != NULL && end[1] == ' ' ? end + 2 : NULL;
}

static bool add(struct processes *processes, int proc_fd, const char *name)
{
	char text[512];
	const char *rest = read_stat(proc_fd, name, text, sizeof text);
	if (rest == NULL)
		return true;
	if (processes->count == processes->size) {
		size_t size = processes->size == 0 ? 64 : processes->size * 2;
		struct process *items = realloc(processes->items, size * sizeof *items);
		if (items == NULL)
			return false;
		processes->items = items;
		processes->size = size;
	}
	processes->items[processes->count++] = (struct process){
		.pid = (pid_t)strtol(name, NULL, 10),
		.parent = (pid_t)strtol(rest + 2, NULL, 10),
		.state = rest[0],
	};
	return true;
}

static bool scan(int proc_fd, struct processes *processes)
{
	_Alignas(struct entry) char block[4 * KIB];
	/* Opened anew: the position in a directory is shared with every process that inherited the descriptor. */
	cleanup_fd int listing = openat(proc_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (listing < 0)
		return false;
	for (;;) {
		long got = syscall(SYS_getdents64, listing, block, sizeof block);
		if (got <= 0)
			return got == 0;
		for (long at = 0; at < got;) {
			const struct entry *entry = (const void *)(block + at);
			at += entry->size;
			if (entry->name[0] >= '1' && entry->name[0] <= '9' && !add(processes, proc_fd, entry->name))
				return false;
		}
	}
}

static bool is_chosen(const struct processes *processes, pid_t pid)
{
	size_t low = 0, high = processes->count;
	while (low < high) {
		size_t middle = low + (high - low) / 2;
		if (processes->items[middle].pid < pid)
			low = middle + 1;
		else
			high = middle;
	}
	return low < processes->count && processes->items[low].pid == pid && processes->items[low].chosen;
}

/* /proc lists pids in rising order, so parents nearly always come before their children and two passes do. */
static void choose(struct processes *processes, proctree_root root, void *context)
{
	pid_t self = getpid();
	bool changed = true;
	while (changed) {
		changed = false;
		for (size_t i = 0; i < processes->count; i++) {
			struct process *process = &processes->items[i];
			if (process->chosen || process->pid == self)
				continue;
			if (process->parent == self)
				process->chosen = root == NULL || root(context, process->pid);
			else
				process->chosen = is_chosen(processes, process->parent);
			changed = changed || process->chosen;
		}
	}
}

/* One look and one signal to each; `*fresh` counts those that had not been stopped yet. */
static int round_of(int proc_fd, int signal_number, proctree_root root, void *context, int *fresh)
{
	__attribute__((cleanup(free_processes))) struct processes processes = {0};
	int alive = 0;
	*fresh = 0;
	if (!scan(proc_fd, &processes))
		return -1;
	choose(&processes, root, context);
	for (size_t i = 0; i < processes.count; i++) {
		const struct process *process = &processes.items[i];
		if (!process->chosen || process->state == 'Z' || process->state == 'X')
			continue;
		alive++;
		if (process->state == 'T' || process->state == 't') {
			if (signal_number == SIGSTOP)
				continue;
		} else {
			(*fresh)++;
		}
		(void)kill(process->pid, signal_number);
	}
	return alive;
}

int proctree_signal(int proc_fd, int signal_number, proctree_root root, void *context)
{
	int fresh;
	return round_of(proc_fd, signal_number, root, context, &fresh);
}

int proctree_kill(int proc_fd, proctree_root root, void *context)
{
	int fresh = 1;
	for (int round = 0; round < STOP_ROUNDS_MAX && fresh > 0; round++)
		if (round_of(proc_fd, SIGSTOP, root, context, &fresh) <= 0)
			break;
	return round_of(proc_fd, SIGKILL, root, context, &fresh);
}

uint64_t proctree_start(int proc_fd, pid_t pid)
{
	char name[16], text[512];
	(void)snprintf(name, sizeof name, "%d", pid);
	const char *rest = read_stat(proc_fd, name, text, sizeof text);
	for (int field = 3; rest != NULL && field < 22; field++) {
		rest = strchr(rest, ' ');
		rest = rest == NULL ? NULL : rest + 1;
	}
	return rest == NULL ? 0 : strtoull(rest, NULL, 10);
}
