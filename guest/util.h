/* Small things every file here uses: descriptors that close themselves, the clock, and how a failure is told.
 * A function that can fail returns false (or -1) and fills a `struct fault`; the caller answers with it. Nothing exits. */
#ifndef GUEST_UTIL_H
#define GUEST_UTIL_H

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define ARRAY_SIZE(array) (sizeof(array) / sizeof((array)[0]))
#define KIB 1024u

/* What failed (a word of the protocol), the kernel's reason and the object that it was about. */
struct fault {
	int error;
	char what[8];
	char text[160];
};

__attribute__((format(printf, 4, 5))) static inline bool fault_set(struct fault *fault, const char *what, int error,
								    const char *format, ...)
{
	va_list arguments;
	fault->error = error;
	(void)snprintf(fault->what, sizeof fault->what, "%s", what);
	va_start(arguments, format);
	(void)vsnprintf(fault->text, sizeof fault->text, format, arguments);
	va_end(arguments);
	return false;
}

static inline void close_fd(int *fd)
{
	if (*fd >= 0) {
		int saved = errno;
		(void)close(*fd); /* Linux gives the number back whatever close says: never again, not even on EINTR */
		errno = saved;
		*fd = -1;
	}
}

static inline int steal_fd(int *fd)
{
	int taken = *fd;
	*fd = -1;
	return taken;
}

static inline void free_pointer(void *place)
{
	void **pointer = place;
	free(*pointer);
	*pointer = NULL;
}

#define cleanup_fd __attribute__((cleanup(close_fd)))
#define cleanup_free __attribute__((cleanup(free_pointer)))

static inline uint64_t now_us(void)
{
	struct timespec now = {0};
	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

/* The whole pages inside a buffer of private memory go back to the kernel; they read as zeros afterwards. */
static inline void pages_give_back(uint8_t *bytes, size_t size)
{
	uintptr_t page = 4 * KIB;
	uintptr_t begin = ((uintptr_t)bytes + page - 1) & ~(page - 1), end = ((uintptr_t)bytes + size) & ~(page - 1);
	if (begin < end)
		(void)madvise((void *)begin, end - begin, MADV_DONTNEED);
}

#endif
