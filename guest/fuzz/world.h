/* The world around PID 1, played by a fuzzer: keepers that were never forked, a clock that is set, children that end when told.
 * The guest's own files run unchanged; the linker leads their system calls here (`--wrap`). */
#ifndef FUZZ_WORLD_H
#define FUZZ_WORLD_H

#include "guest.h"

#define WORKERS_MAX 8u
#define STREAMS 2u

/* A keeper with its command, as PID 1 knows them. Descriptors are -1 when closed. */
struct worker {
	pid_t pid; /* 0: no worker here */
	bool reaped;
	int channel, in, out[STREAMS];
	uint64_t written[STREAMS];
};

struct world {
	struct guest *guest;
	struct worker workers[WORKERS_MAX];
	uint64_t now_us;
	int accepted_fd;	 /* what the next accept gives; -1: nobody knocks */
	unsigned failures;	 /* of the calls to come that fail for want of descriptors or processes */
	int orphans;		 /* looks at /proc for which something is still alive */
	unsigned deaths, dead[WORKERS_MAX], statuses[WORKERS_MAX]; /* of workers that wait to be told */
};

extern struct world world;

void world_open(struct guest *guest);
void world_close(void);
/* Somebody connects; gives that end. */
int world_knock(void);
/* Its end, or its stop, as wait tells it. */
void worker_changes(unsigned index, int status);
/* The worker that the guest knows by that keeper; NULL for none. */
const struct worker *worker_of(pid_t keeper);
/* Writes bytes of the pattern: what stands at an offset can be told from it alone. */
void worker_writes(struct worker *worker, unsigned stream, size_t size);
uint8_t pattern(unsigned stream, uint64_t offset);

#endif
