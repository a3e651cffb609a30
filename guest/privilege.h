/* Whose rights a process of the guest has, and which descriptors it holds. */
#ifndef GUEST_PRIVILEGE_H
#define GUEST_PRIVILEGE_H

#include "keeper.h"
#include "user.h"

/* Become `uid` for good but keep the capabilities, so that root of the sandbox can neither slow nor read this process while it can
 * still signal every process and start commands as anyone. */
bool privilege_drop_to(uid_t uid, struct fault *fault);

/* Who a command runs as; `user` is NULL when nothing was asked for. */
bool privilege_identity(const struct house *house, const char *user, struct identity *identity, struct fault *fault);

/* In the child, with raw system calls only: it shares its parent's memory. errno tells why not. */
bool privilege_become(const struct house *house, const struct identity *identity);

bool privilege_close_from(int first);
/* Every descriptor from 3 on but these; negative ones in `keep` are skipped. */
bool privilege_close_others(const int *keep, size_t count);

#endif
