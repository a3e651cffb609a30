#include "user.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#define PASSWD_BYTES_MAX (1024u * 1024u)
#define FIELDS_MAX 7u

/* The whole of a regular file; an absent one is empty. Nothing here waits: not for a FIFO's writer, nor for a lease. */
static bool read_table(const char *path, char **text, struct fault *fault)
{
	struct stat facts;
	*text = NULL;
	cleanup_fd int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (fd < 0 && errno == ENOENT)
		return true;
	if (fd < 0 || fstat(fd, &facts) != 0)
		return fault_set(fault, "user", errno, "%s", path);
	if (!S_ISREG(facts.st_mode))
		return fault_set(fault, "user", EINVAL, "%s is not a regular file", path);
	if (facts.st_size > (off_t)PASSWD_BYTES_MAX)
		return fault_set(fault, "user", EFBIG, "%s is over 1 MiB", path);
	size_t size = (size_t)facts.st_size, count = 0;
	cleanup_free char *bytes = malloc(size + 1);
	if (bytes == NULL)
		return fault_set(fault, "user", ENOMEM, "%s", path);
	while (count < size) {
		ssize_t got = read(fd, bytes + count, size - count);
		if (got < 0)
			return fault_set(fault, "user", errno, "%s", path);
		if (got == 0)
			break;
		count += (size_t)got;
	}
	bytes[count] = '\0';
	*text = bytes;
	bytes = NULL;
	return true;
}

/* Cuts the next line of colon-separated fields out of the text; absent fields are empty. */
static bool next_line(char **text, char *fields[FIELDS_MAX])
{
	static char empty[1];
	if (*text == NULL || **text == '\0')
		return false;
	char *line = *text;
	char *end = strchr(line, '\n');
	*text = end == NULL ? NULL : end + 1;
	if (end != NULL)
		*end = '\0';
	for (size_t i = 0; i < FIELDS_MAX; i++) {
		fields[i] = line == NULL ? empty : line;
		char *colon = line == NULL || i + 1 == FIELDS_MAX ? NULL : strchr(line, ':');
		if (colon != NULL)
			*colon = '\0';
		line = colon == NULL ? NULL : colon + 1;
	}
	return true;
}

static bool parse_id(const char *text, uint32_t *id)
{
	uint64_t value = 0;
	if (*text == '\0' || strlen(text) > 10 || strspn(text, "0123456789") != strlen(text))
		return false;
	value = strtoull(text, NULL, 10);
	if (value >= UINT32_MAX) /* the last one means "leave it" to the kernel */
		return false;
	*id = (uint32_t)value;
	return true;
}

static void take_entry(struct identity *identity, char *const fields[FIELDS_MAX], uid_t uid)
{
	identity->uid = uid;
	if (!parse_id(fields[3], &identity->gid))
		identity->gid = 0;
	(void)snprintf(identity->name, sizeof identity->name, "%s", fields[0]);
	(void)snprintf(identity->home, sizeof identity->home, "%s", fields[5][0] == '/' ? fields[5] : "/");
}

static bool find_in_passwd(const char *wanted, struct identity *identity, struct fault *fault)
{
	cleanup_free char *table = NULL;
	char *fields[FIELDS_MAX];
	uid_t wanted_uid = 0, uid = 0;
	bool numeric = parse_id(wanted, &wanted_uid), found = false;
	if (!read_table("/etc/passwd", &table, fault))
		return false;
	for (char *rest = table; next_line(&rest, fields);) {
		if (!parse_id(fields[2], &uid))
			continue;
		if (strcmp(fields[0], wanted) == 0) {
			take_entry(identity, fields, uid);
			return true;
		}
		if (numeric && !found && uid == wanted_uid) {
			take_entry(identity, fields, uid);
			found = true;
		}
	}
	if (found)
		return true;
	if (!numeric)
		return fault_set(fault, "user", ENOENT, "no user %.64s in /etc/passwd", wanted);
	identity->uid = wanted_uid;
	identity->gid = 0;
	(void)snprintf(identity->name, sizeof identity->name, "%s", wanted_uid == 0 ? "root" : wanted);
	(void)snprintf(identity->home, sizeof identity->home, "%s", wanted_uid == 0 ? "/root" : "/");
	return true;
}

static bool is_member(const char *members, const char *name)
{
	size_t length = strlen(name);
	while (*members != '\0') {
		size_t size = strcspn(members, ",");
		if (size == length && memcmp(members, name, size) == 0)
			return true;
		members += size + (members[size] == ',' ? 1 : 0);
	}
	return false;
}

static bool find_group(const char *wanted, struct identity *identity, struct fault *fault)
{
	cleanup_free char *table = NULL;
	char *fields[FIELDS_MAX];
	gid_t gid = 0;
	if (!read_table("/etc/group", &table, fault))
		return false;
	for (char *rest = table; next_line(&rest, fields);)
		if (strcmp(fields[0], wanted) == 0 && parse_id(fields[2], &gid)) {
			identity->gid = gid;
			return true;
		}
	if (parse_id(wanted, &identity->gid))
		return true;
	return fault_set(fault, "user", ENOENT, "no group %.64s in /etc/group", wanted);
}

static bool find_memberships(struct identity *identity, struct fault *fault)
{
	cleanup_free char *table = NULL;
	char *fields[FIELDS_MAX];
	gid_t gid = 0;
	if (!read_table("/etc/group", &table, fault))
		return false;
	for (char *rest = table; next_line(&rest, fields) && identity->group_count < GROUPS_MAX;)
		if (parse_id(fields[2], &gid) && gid != identity->gid && is_member(fields[3], identity->name))
			identity->groups[identity->group_count++] = gid;
	return true;
}

bool user_find(const char *text, struct identity *identity, struct fault *fault)
{
	char name[128];
	const char *colon = strchr(text, ':');
	size_t length = colon == NULL ? strlen(text) : (size_t)(colon - text);
	if (length == 0 || length >= sizeof name)
		return fault_set(fault, "user", EINVAL, "%.64s is no user", text);
	memcpy(name, text, length);
	name[length] = '\0';
	identity->group_count = 0;
	if (!find_in_passwd(name, identity, fault))
		return false;
	/* A group that was asked for is the only one, as elsewhere in the field. */
	return colon == NULL ? find_memberships(identity, fault) : find_group(colon + 1, identity, fault);
}
