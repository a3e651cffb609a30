/* Fuzzing of what a keeper reads before a command runs: the fields of EXEC, whose texts are ended in place, and the sandbox's own
 * /etc/passwd and /etc/group, which belong to whoever is hostile in it.
 *
 * An input is passwd, with a byte before it that says its size; group, with one that says how often it is repeated and one for its size;
 * and fields, with a byte for the tag and one for the size. */
#include "tape.h"
#include "start.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);

struct table {
	struct tape part;
	unsigned times;
};

static struct table passwd, group;

static int open_table(const struct table *table)
{
	int fd = memfd_create("table", MFD_CLOEXEC);
	must(fd >= 0);
	for (unsigned i = 0; i < table->times; i++)
		must(write(fd, table->part.data, table->part.size) == (ssize_t)table->part.size);
	must(lseek(fd, 0, SEEK_SET) == 0);
	return fd;
}

int __wrap_open(const char *path, int flags, ...)
{
	if (strcmp(path, "/etc/passwd") == 0)
		return open_table(&passwd);
	if (strcmp(path, "/etc/group") == 0)
		return open_table(&group);
	return __real_open(path, flags, 0);
}

static size_t length_of(char *const *texts, const uint8_t *begin, const uint8_t *end, const struct start *start)
{
	size_t count = 0;
	for (; texts[count] != NULL; count++) {
		const uint8_t *text = (const uint8_t *)texts[count];
		bool in_frame = text >= begin && text <= end && text + strlen(texts[count]) <= end;
		must(in_frame || (const void *)text == start->environment[0] || (const void *)text == start->environment[1] ||
		     (const void *)text == start->environment[2]);
	}
	return count;
}

static void check(const struct start *start, const struct frame *frame)
{
	const uint8_t *end = frame->body + frame->size;
	if (start->argv != NULL)
		must(length_of(start->argv, frame->body, end, start) > 0);
	else
		must(start->script_argv[0] != NULL && start->script_argv[2] != NULL);
	must(length_of(start->envp, frame->body, end, start) <= frame->size / FIELD_HEADER_BYTES + 3);
	must(strlen(start->cwd) <= frame->size + 1);
	must(start->identity.group_count <= GROUPS_MAX && start->identity.uid != UINT32_MAX && start->identity.uid != 65533);
	must(strnlen(start->identity.name, sizeof start->identity.name) < sizeof start->identity.name);
	must(start->identity.home[0] == '/' && strnlen(start->identity.home, sizeof start->identity.home) < sizeof start->identity.home);
}

/* The input's rest as fields: mostly the texts of EXEC. */
static void build(struct builder *builder, struct tape *tape)
{
	static const enum tag tags[] = {TAG_ARG, TAG_ENV, TAG_CWD, TAG_USER, TAG_SHELL, TAG_ARG, TAG_ENV};
	build_begin(builder, KIND_EXEC, 1);
	while (tape->size > 0) {
		uint8_t which = take_byte(tape);
		enum tag tag = which < 200 ? tags[which % ARRAY_SIZE(tags)] : (enum tag)which;
		struct tape part = take_part(tape, take_byte(tape));
		build_bytes(builder, tag, part.data, part.size);
	}
	must(build_end(builder));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct start start;
	const struct house house = {.proc_fd = -1, .null_fd = -1, .own_uid = 65533, .changes_user = true};
	struct tape tape = {.data = data, .size = size};
	struct frame frame;
	const char *why = NULL;
	size_t need, room = FRAME_HEADER_BYTES + size * FIELD_HEADER_BYTES;
	passwd = (struct table){.times = 1, .part = take_part(&tape, take_byte(&tape))};
	group.times = 1 + 2u * take_byte(&tape);
	group.part = take_part(&tape, take_byte(&tape));
	struct builder builder = {.bytes = malloc(room), .size = room};
	build(&builder, &tape);
	/* A byte more than the frame has, as connections keep it. */
	uint8_t *bytes = malloc(builder.at + 1);
	memcpy(bytes, builder.bytes, builder.at);
	if (frame_parse(bytes, builder.at, &frame, &need, &why) == FRAME_WHOLE) {
		memset(&start, 0, sizeof start);
		if (start_prepare(&start, &house, &frame))
			check(&start, &frame);
		else
			must(start.fault.error != 0 && memchr(start.fault.text, '\0', sizeof start.fault.text) != NULL);
		start_free(&start);
	}
	free(bytes);
	free(builder.bytes);
	return 0;
}
