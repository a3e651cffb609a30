/* The one state of the guest, and what its parts ask of each other. Everything runs in one loop of one thread. */
#ifndef GUEST_GUEST_H
#define GUEST_GUEST_H

#include "frames.h"
#include "keeper.h"
#include "stream.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define COMMANDS_MAX 256u
#define CONNECTIONS_MAX 4u /* one that has said HELLO, and some that have not yet */
#define SCRATCH_BYTES (64u * KIB)
#define OUTBOX_BYTES (64u * KIB)  /* of frames about commands, made only when all before them are gone */
#define REPLIES_BYTES (64u * KIB) /* more, for answers to frames that come in meanwhile */
#define OUTPUT_DATA_BYTES_MAX (32u * KIB)
#define DETACH_AFTER_US 100000u

/* What an event of the loop is about; the index is a connection's or a command's place. */
enum source { SOURCE_LISTENER, SOURCE_CHILDREN, SOURCE_CONNECTION, SOURCE_KEEPER, SOURCE_STDOUT, SOURCE_STDERR, SOURCE_STDIN };

struct connection {
	int fd;
	uint32_t events; /* what the loop watches for */
	uint64_t age;	 /* the smallest is the oldest */
	uint8_t *in;	 /* a frame that has come in part, or NULL */
	size_t in_count, in_need;
};

struct command {
	uint64_t id;
	pid_t keeper_pid;
	int channel; /* to the keeper */
	bool terminal;
	struct stream streams[2];
	struct input input;

	bool started, failed, ended; /* the first process: runs its program; never did; is over */
	bool complete;		     /* and its output too, so that EXITED can be told */
	bool detached, tree_alive;
	bool orphaned; /* its keeper was killed: PID 1 ends what is left of the tree */
	bool forgotten;
	pid_t pid;
	uint64_t pid_start, begun_us;
	uint64_t detach_at_us;	/* when others may no longer hold back the end */
	uint64_t answer_by_us; /* when a keeper that was told to kill must have answered; 0: nothing asked */
	unsigned keeper_stops;
	struct outcome outcome;
	struct fault fault;

	bool told_started, told_result, told_alive, told_gone; /* on this connection */
};

struct guest {
	struct house house;
	pid_t self;
	int epoll_fd, signal_fd, listen_fd;

	struct connection connections[CONNECTIONS_MAX];
	struct connection *active; /* the one that has said HELLO */
	uint64_t accepted;
	unsigned lists_due, list_at;
	uint8_t outbox[OUTBOX_BYTES + REPLIES_BYTES];
	size_t out_at, out_count;

	struct command *commands[COMMANDS_MAX];
	unsigned commands_max, turn;
	bool children; /* that ended may wait to be reaped */
	bool hunting;  /* for orphans of killed keepers */
	uint64_t hunt_at_us;
	uint64_t rest_at_us; /* when unused memory is given back; 0: nothing to give */

	uint8_t scratch[SCRATCH_BYTES + 1]; /* what was read last; the byte past it ends a text in place */
};

/* loop.c */
bool loop_watch(struct guest *guest, int fd, uint32_t events, enum source source, unsigned index);
bool loop_rewatch(struct guest *guest, int fd, uint32_t events, enum source source, unsigned index);
void loop_unwatch(struct guest *guest, int fd);
/* Unwatches before it closes: a keeper that was just forked may hold a copy, and epoll would go on about it. */
void loop_close(struct guest *guest, int *fd);
/* Waits for something to happen, or for what is due, and deals with it. */
void loop_turn(struct guest *guest);
_Noreturn void loop_run(struct guest *guest);

/* connection.c */
void connection_accept(struct guest *guest);
void connection_event(struct guest *guest, unsigned index, uint32_t events);
/* ERROR about a command's frame, to the active connection. */
void connection_complain(struct guest *guest, uint64_t command, const char *text);
struct builder connection_reply(struct guest *guest);
void connection_replied(struct guest *guest, struct builder *builder);
/* Sends what can be sent. */
void connection_pump(struct guest *guest);

/* command.c */
struct command *command_find(struct guest *guest, uint64_t id);
void command_handle(struct guest *guest, struct frame *frame);
void command_event(struct guest *guest, unsigned index, enum source source);
void command_reaped(struct guest *guest, pid_t pid, int status, const struct rusage *usage);
/* Does what is due by the clock. */
void command_tick(struct guest *guest, uint64_t now);
uint64_t command_deadline(const struct guest *guest);
void command_free(struct guest *guest, unsigned index);

/* exec.c */
void exec_command(struct guest *guest, struct frame *frame);

/* report.c: what commands have to tell, as frames */
void report_detach(struct guest *guest);
/* Fills the builder; false when nothing was left to say. */
bool report_fill(struct guest *guest, struct builder *builder);

#endif
