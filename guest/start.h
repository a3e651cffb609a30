/* The start of a command's first process, from the EXEC frame to the exec. */
#ifndef GUEST_START_H
#define GUEST_START_H

#include "keeper.h"
#include "user.h"

#include <sys/resource.h>
#include <sys/types.h>

struct start {
	char **argv, **envp;
	const char *cwd;
	struct identity identity;
	struct rlimit files;
	int script_fd; /* the program of a shell that is too long for an argument; else -1 */
	char *script_argv[4], environment[3][320];
	struct fault fault;
};

/* Reads the frame in place: the strings of `start` lie in it. */
bool start_prepare(struct start *start, const struct house *house, struct frame *frame);
/* The pid once the program runs; -1 with `start->fault` when it does not. */
pid_t start_process(struct start *start, const struct house *house, const struct wiring *wiring);
void start_free(struct start *start);

#endif
