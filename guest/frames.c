#include "frames.h"

#include <string.h>

static uint64_t get_le(const uint8_t *bytes, unsigned count)
{
	uint64_t value = 0;
	while (count > 0)
		value = value << 8 | bytes[--count];
	return value;
}

static void put_le(uint8_t *bytes, uint64_t value, unsigned count)
{
	for (unsigned i = 0; i < count; i++)
		bytes[i] = (uint8_t)(value >> (8 * i));
}

static bool is_bytes(uint16_t tag)
{
	switch (tag) {
	case TAG_BUILD:
	case TAG_ARG:
	case TAG_SHELL:
	case TAG_ENV:
	case TAG_CWD:
	case TAG_USER:
	case TAG_DATA:
	case TAG_WHAT:
	case TAG_TEXT:
		return true;
	default:
		return false;
	}
}

static const char *check_fields(const uint8_t *body, size_t size)
{
	size_t at = 0;
	while (at < size) {
		if (size - at < FIELD_HEADER_BYTES)
			return "a frame ends within a field's head";
		uint16_t tag = (uint16_t)get_le(body + at, 2);
		uint64_t length = get_le(body + at + 2, 4);
		at += FIELD_HEADER_BYTES;
		if (length > size - at)
			return "a field is longer than its frame";
		if (tag >= TAG_VERSION_MIN && tag <= TAG_OPEN_FILES && !is_bytes(tag) && length != 8)
			return "a number is not 8 bytes";
		at += length;
	}
	return NULL;
}

enum frame_status frame_parse(uint8_t *bytes, size_t count, struct frame *frame, size_t *need, const char **why)
{
	*need = FRAME_HEADER_BYTES;
	if (count < FRAME_HEADER_BYTES)
		return FRAME_PART;
	frame->size = (uint32_t)get_le(bytes, 4);
	frame->kind = (uint16_t)get_le(bytes + 4, 2);
	frame->command = get_le(bytes + 8, 8);
	frame->body = bytes + FRAME_HEADER_BYTES;
	if (frame->size > FRAME_BODY_BYTES_MAX) {
		*why = "a frame is over the size allowed";
		return FRAME_BAD;
	}
	*need += frame->size;
	if (count < *need)
		return FRAME_PART;
	*why = check_fields(frame->body, frame->size);
	return *why != NULL ? FRAME_BAD : FRAME_WHOLE;
}

bool frame_next(const struct frame *frame, size_t *at, struct field *field)
{
	if (*at >= frame->size)
		return false;
	uint8_t *head = frame->body + *at;
	field->tag = (uint16_t)get_le(head, 2);
	field->size = (uint32_t)get_le(head + 2, 4);
	field->data = head + FIELD_HEADER_BYTES;
	*at += FIELD_HEADER_BYTES + field->size;
	return true;
}

bool frame_find(const struct frame *frame, enum tag tag, struct field *field)
{
	struct field each;
	size_t at = 0;
	while (frame_next(frame, &at, &each))
		if (each.tag == tag) {
			*field = each;
			return true;
		}
	return false;
}

uint64_t frame_number(const struct frame *frame, enum tag tag, uint64_t absent)
{
	struct field field;
	return frame_find(frame, tag, &field) ? get_le(field.data, 8) : absent;
}

void build_begin(struct builder *builder, enum kind kind, uint64_t command)
{
	builder->start = builder->at;
	builder->failed = builder->size - builder->at < FRAME_HEADER_BYTES;
	if (builder->failed)
		return;
	uint8_t *head = builder->bytes + builder->at;
	put_le(head, 0, 4);
	put_le(head + 4, (uint64_t)kind, 2);
	put_le(head + 6, 0, 2);
	put_le(head + 8, command, 8);
	builder->at += FRAME_HEADER_BYTES;
}

uint8_t *build_room(struct builder *builder, enum tag tag, size_t size)
{
	if (builder->failed || builder->size - builder->at < FIELD_HEADER_BYTES ||
	    builder->size - builder->at - FIELD_HEADER_BYTES < size) {
		builder->failed = true;
		return NULL;
	}
	uint8_t *head = builder->bytes + builder->at;
	put_le(head, (uint64_t)tag, 2);
	put_le(head + 2, size, 4);
	builder->at += FIELD_HEADER_BYTES + size;
	return head + FIELD_HEADER_BYTES;
}

void build_bytes(struct builder *builder, enum tag tag, const void *data, size_t size)
{
	uint8_t *room = build_room(builder, tag, size);
	if (room != NULL && size > 0)
		memcpy(room, data, size);
}

void build_number(struct builder *builder, enum tag tag, uint64_t value)
{
	uint8_t *room = build_room(builder, tag, 8);
	if (room != NULL)
		put_le(room, value, 8);
}

void build_text(struct builder *builder, enum tag tag, const char *text)
{
	build_bytes(builder, tag, text, strlen(text));
}

bool build_end(struct builder *builder)
{
	if (builder->failed) {
		builder->at = builder->start;
		return false;
	}
	put_le(builder->bytes + builder->start, builder->at - builder->start - FRAME_HEADER_BYTES, 4);
	return true;
}
