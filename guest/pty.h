/* A terminal for a command: its master stays with PID 1, its slave is the command's session. */
#ifndef GUEST_PTY_H
#define GUEST_PTY_H

#include "keeper.h"
#include "user.h"

/* The master of a new terminal of that size, non-blocking; -1 with the fault. */
int pty_open_master(uint64_t rows, uint64_t cols, struct fault *fault);
bool pty_resize(int master_fd, uint64_t rows, uint64_t cols);
/* Fills the three descriptors of a wiring with the slave and gives it to the command's user. */
bool pty_open_slave(struct wiring *wiring, const struct identity *identity, struct fault *fault);

#endif
