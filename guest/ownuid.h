/* The guest's uid is nobody else's: root of the sandbox may become any of its uids, and whoever has the guest's could slow it, bound it
 * and pin it as its owner. */
#ifndef GUEST_OWNUID_H
#define GUEST_OWNUID_H

#include "util.h"

#include <sys/types.h>

/* From now on neither this process nor any that comes from it can become `uid`, by a filter of system calls. */
bool ownuid_reserve(uid_t uid, struct fault *fault);

#endif
