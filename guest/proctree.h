/* Who descends from whom, read from /proc: this must work where the kernel has no /proc/PID/task/TID/children. */
#ifndef GUEST_PROCTREE_H
#define GUEST_PROCTREE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Says whether a child of ours is the root of a tree that is to be signalled. */
typedef bool (*proctree_root)(void *context, pid_t pid);

/* Sends a signal to every descendant of this process that comes from a child that `root` picks (NULL: all of them).
 * Gives how many are alive, zombies left out; -1 when /proc could not be read. */
int proctree_signal(int proc_fd, int signal_number, proctree_root root, void *context);

/* SIGKILL to all of them. They are stopped first, top down and again until nothing new appears, so that no process can fork
 * past the signal and no pid can be freed and given to another between the look and the kill. */
int proctree_kill(int proc_fd, proctree_root root, void *context);

/* Field 22 of /proc/PID/stat, the start in clock ticks since boot; 0 when it cannot be read. */
uint64_t proctree_start(int proc_fd, pid_t pid);

#endif
