/* Who a command runs as, looked up in the sandbox's own /etc/passwd and /etc/group. The files belong to the sandbox: anything may
 * lie there, so this runs in a keeper and never in PID 1. */
#ifndef GUEST_USER_H
#define GUEST_USER_H

#include "util.h"

#include <sys/types.h>

#define GROUPS_MAX 256u

struct identity {
	uid_t uid;
	gid_t gid;
	gid_t groups[GROUPS_MAX];
	size_t group_count;
	char name[128], home[256];
};

/* `text` is NAME or UID, with :GROUP or :GID if wanted. */
bool user_find(const char *text, struct identity *identity, struct fault *fault);

#endif
