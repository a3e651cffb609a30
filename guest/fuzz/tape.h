/* The input of a fuzzer, a tape taken piece by piece; what is asked for past its end is zero or empty. */
#ifndef FUZZ_TAPE_H
#define FUZZ_TAPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct tape {
	const uint8_t *data;
	size_t size;
};

static inline void must(bool holds)
{
	if (!holds)
		abort();
}

static inline uint8_t take_byte(struct tape *tape)
{
	if (tape->size == 0)
		return 0;
	tape->size--;
	return *tape->data++;
}

/* Mostly small; at times anything. */
static inline uint64_t take_number(struct tape *tape)
{
	uint8_t first = take_byte(tape);
	uint64_t value = first;
	for (unsigned more = first < 200 ? 0 : first < 240 ? 2 : 7; more > 0; more--)
		value = value << 8 | take_byte(tape);
	return value;
}

static inline struct tape take_part(struct tape *tape, size_t wanted)
{
	struct tape part = {.data = tape->data, .size = wanted < tape->size ? wanted : tape->size};
	tape->data += part.size;
	tape->size -= part.size;
	return part;
}

#endif
