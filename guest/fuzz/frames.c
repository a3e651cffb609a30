/* Fuzzing of frames.c: whatever the bytes are and wherever they are cut, the answer is the same, lies within them, and what was
 * parsed can be built again. Every look is at a copy of exactly its size, so that the sanitizer sees one byte too many. */
#include "frames.h"
#include "tape.h"

#include <string.h>

/* A part is a part of whatever comes of the whole, and bytes are refused only for what is in them. */
static void check_cut(const uint8_t *data, size_t cut, size_t size, enum frame_status whole, size_t whole_need)
{
	struct frame frame;
	const char *why = NULL;
	size_t need = 0;
	uint8_t *part = malloc(cut + 1);
	memcpy(part, data, cut);
	enum frame_status status = frame_parse(part, cut, &frame, &need, &why);
	free(part);
	switch (status) {
	case FRAME_PART:
		must(need > cut && need <= FRAME_HEADER_BYTES + FRAME_BODY_BYTES_MAX);
		must(whole != FRAME_WHOLE || cut < whole_need);
		break;
	case FRAME_WHOLE:
		must(whole == FRAME_WHOLE && need == whole_need && need <= cut);
		break;
	case FRAME_BAD:
		must(whole == FRAME_BAD && why != NULL && cut <= size);
		break;
	}
}

/* Every field lies within the frame, and each can be built into a buffer that has room for it and into no smaller one. */
static void check_fields(const struct frame *frame)
{
	size_t room = FRAME_HEADER_BYTES + frame->size, at = 0, count = 0;
	struct builder builder = {.bytes = malloc(room), .size = room};
	struct builder small = {.bytes = malloc(room), .size = room - 1};
	struct field field, found;
	build_begin(&builder, (enum kind)frame->kind, frame->command);
	build_begin(&small, (enum kind)frame->kind, frame->command);
	while (frame_next(frame, &at, &field)) {
		must(field.data >= frame->body + FIELD_HEADER_BYTES && field.data + field.size <= frame->body + frame->size);
		must(frame_find(frame, (enum tag)field.tag, &found) && found.data <= field.data);
		build_bytes(&builder, (enum tag)field.tag, field.data, field.size);
		build_bytes(&small, (enum tag)field.tag, field.data, field.size);
		count++;
	}
	must(at == frame->size && count <= frame->size / FIELD_HEADER_BYTES);
	must(build_end(&builder) && builder.at == room);
	must(!build_end(&small) && small.at == 0);
	must(memcmp(builder.bytes + FRAME_HEADER_BYTES, frame->body, frame->size) == 0);
	for (unsigned tag = TAG_VERSION_MIN; tag <= TAG_TREE_ALIVE; tag++)
		if (tag == TAG_OFFSET || tag == TAG_SIGNAL)
			(void)frame_number(frame, (enum tag)tag, 0);
	free(builder.bytes);
	free(small.bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	while (size > 0) {
		struct frame frame;
		const char *why = NULL;
		size_t need = 0;
		uint8_t *bytes = malloc(size);
		memcpy(bytes, data, size);
		enum frame_status status = frame_parse(bytes, size, &frame, &need, &why);
		for (size_t cut = 0; cut <= size && cut < 3 * FRAME_HEADER_BYTES; cut++)
			check_cut(data, cut, size, status, need);
		check_cut(data, size / 2, size, status, need);
		check_cut(data, size - 1, size, status, need);
		if (status == FRAME_WHOLE)
			check_fields(&frame);
		free(bytes);
		if (status != FRAME_WHOLE)
			break;
		data += need;
		size -= need;
	}
	return 0;
}
