/* The tar reader. What an honest archiver would not write is refused, not repaired. */
#include "tar.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

void tar_start(struct tar_reader *reader, const struct tar_sink *sink)
{
    memset(reader, 0, sizeof *reader);
    reader->sink = *sink;
}

static void forget(struct tar_reader *reader)
{
    free(reader->name);
    free(reader->link);
    reader->name = reader->link = NULL;
    reader->has_size = reader->has_mtime = false;
}

void tar_free(struct tar_reader *reader)
{
    forget(reader);
    free(reader->meta);
    reader->meta = NULL;
}

/* Octal with blanks around, or base 256. False: neither, or too large. */
static bool number(const uint8_t *field, size_t size, uint64_t *value)
{
    uint64_t sum = 0;
    size_t at = 0;
    if (field[0] & 0x80) {
        if (field[0] != 0x80)
            return false; /* negative, or more than 64 bits */
        for (at = 1; at < size; at++) {
            if (sum >> 55)
                return false;
            sum = sum << 8 | field[at];
        }
        *value = sum;
        return true;
    }
    while (at < size && field[at] == ' ')
        at++;
    for (; at < size && field[at] >= '0' && field[at] <= '7'; at++) {
        if (sum >> 60)
            return false;
        sum = sum << 3 | (uint64_t)(field[at] - '0');
    }
    for (; at < size; at++)
        if (field[at] != ' ' && field[at] != 0)
            return false;
    *value = sum;
    return true;
}

static bool checksum_fits(const uint8_t *block)
{
    uint64_t told;
    unsigned sum = 0;
    for (size_t i = 0; i < TAR_BLOCK; i++)
        sum += i >= 148 && i < 156 ? ' ' : block[i];
    return number(block + 148, 8, &told) && told == sum;
}

static size_t length(const uint8_t *field, size_t size)
{
    const uint8_t *end = memchr(field, 0, size);
    return end != NULL ? (size_t)(end - field) : size;
}

static char *copy_text(const void *data, size_t size)
{
    char *text = malloc(size + 1);
    if (text == NULL)
        return NULL;
    memcpy(text, data, size);
    text[size] = 0;
    return text;
}

/* Cleans a name in place. False: absolute, climbing, or longer than any path. */
static bool clean(char *name)
{
    if (name[0] == '/' || strlen(name) > TAR_NAME_MAX)
        return false;
    char *out = name;
    for (const char *part = name; *part != 0;) {
        size_t size = strcspn(part, "/");
        if (size == 2 && part[0] == '.' && part[1] == '.')
            return false;
        if (size > 255)
            return false;
        if (size != 0 && !(size == 1 && part[0] == '.')) {
            if (out != name)
                *out++ = '/';
            memmove(out, part, size);
            out += size;
        }
        part += size;
        if (*part == '/')
            part++;
    }
    *out = 0;
    return true;
}

static bool decimal(const char *text, size_t size, uint64_t limit, uint64_t *value)
{
    uint64_t sum = 0;
    if (size == 0 || size > 19)
        return false;
    for (size_t i = 0; i < size; i++) {
        if (text[i] < '0' || text[i] > '9')
            return false;
        sum = sum * 10 + (uint64_t)(text[i] - '0');
    }
    *value = sum;
    return sum <= limit;
}

static bool pax_time(struct tar_reader *reader, const char *text, size_t size)
{
    uint64_t seconds, fraction = 0;
    bool negative = size != 0 && text[0] == '-';
    text += negative;
    size -= negative;
    const char *dot = memchr(text, '.', size);
    size_t whole = dot != NULL ? (size_t)(dot - text) : size;
    if (!decimal(text, whole, INT64_MAX / 2, &seconds))
        return false;
    size_t digits = 0;
    for (size_t i = whole + 1; i < size; i++) {
        if (text[i] < '0' || text[i] > '9')
            return false;
        if (digits < 9)
            fraction = fraction * 10 + (uint64_t)(text[i] - '0'), digits++;
    }
    for (; digits < 9; digits++)
        fraction *= 10;
    reader->has_mtime = true;
    reader->mtime = negative ? -(int64_t)seconds : (int64_t)seconds;
    reader->mtime_ns = negative ? 0 : (uint32_t)fraction;
    return true;
}

static int pax_record(struct tar_reader *reader, const char *key, size_t key_size, const char *value, size_t size)
{
#define KEY(text) (key_size == sizeof text - 1 && memcmp(key, text, key_size) == 0)
    if (KEY("path") || KEY("linkpath")) {
        char **target = KEY("path") ? &reader->name : &reader->link;
        if (size == 0 || size > TAR_NAME_MAX || memchr(value, 0, size) != NULL)
            return EINVAL;
        free(*target);
        *target = copy_text(value, size);
        return *target != NULL ? 0 : ENOMEM;
    }
    if (KEY("size")) {
        reader->has_size = true;
        return decimal(value, size, INT64_MAX, &reader->size) ? 0 : EINVAL;
    }
    if (KEY("mtime"))
        return pax_time(reader, value, size) ? 0 : EINVAL;
#undef KEY
    if (key_size > 11 && memcmp(key, "GNU.sparse.", 11) == 0)
        return EINVAL; /* the bytes are not the file's */
    return 0;
}

/* Records of the form "length key=value\n". */
static int pax_records(struct tar_reader *reader)
{
    const char *at = reader->meta;
    size_t left = reader->meta_size;
    while (left != 0) {
        const char *blank = memchr(at, ' ', left < 20 ? left : 20);
        uint64_t size;
        if (blank == NULL || !decimal(at, (size_t)(blank - at), left, &size))
            return EINVAL;
        size_t head = (size_t)(blank - at) + 1;
        if (size < head + 2 || at[size - 1] != '\n')
            return EINVAL;
        const char *key = blank + 1, *equals = memchr(key, '=', size - head - 1);
        if (equals == NULL)
            return EINVAL;
        int error = pax_record(reader, key, (size_t)(equals - key), equals + 1,
                               (size_t)(at + size - 1 - (equals + 1)));
        if (error != 0)
            return error;
        at += size;
        left -= size;
    }
    return 0;
}

static int take_meta(struct tar_reader *reader)
{
    int error = 0;
    reader->meta[reader->meta_size] = 0;
    if (reader->meta_type == 'x' || reader->meta_type == 'X')
        error = pax_records(reader);
    else if (reader->meta_type == 'L' || reader->meta_type == 'K') {
        char **target = reader->meta_type == 'L' ? &reader->name : &reader->link;
        size_t size = length((const uint8_t *)reader->meta, reader->meta_size);
        if (size == 0 || size > TAR_NAME_MAX)
            error = EINVAL;
        else {
            free(*target);
            *target = copy_text(reader->meta, size);
            error = *target != NULL ? 0 : ENOMEM;
        }
    }
    free(reader->meta);
    reader->meta = NULL;
    return error; /* a global header ('g') says nothing that is needed */
}

static int begin_meta(struct tar_reader *reader, char type, uint64_t size)
{
    if (size > TAR_META_MAX || size == 0)
        return EINVAL;
    reader->meta = malloc((size_t)size + 1);
    if (reader->meta == NULL)
        return ENOMEM;
    reader->meta_type = type;
    reader->meta_size = 0;
    reader->left = size;
    reader->padding = (TAR_BLOCK - size % TAR_BLOCK) % TAR_BLOCK;
    reader->state = TAR_AT_META;
    return 0;
}

/* ustar splits long names at a slash; GNU's magic differs and means no prefix. */
static char *header_name(const uint8_t *block)
{
    size_t size = length(block, 100), prefix = 0;
    if (memcmp(block + 257, "ustar\0", 6) == 0)
        prefix = length(block + 345, 155);
    char *name = malloc(prefix + size + 2);
    if (name == NULL)
        return NULL;
    memcpy(name, block + 345, prefix);
    if (prefix != 0)
        name[prefix++] = '/';
    memcpy(name + prefix, block, size);
    name[prefix + size] = 0;
    return name;
}

static int fill_entry(struct tar_reader *reader, struct tar_entry *entry, char type)
{
    const uint8_t *block = reader->block;
    uint64_t mode, mtime, size;
    if (!number(block + 100, 8, &mode) || !number(block + 136, 12, &mtime) || !number(block + 124, 12, &size))
        return EINVAL;
    if (reader->name == NULL)
        reader->name = header_name(block);
    if (reader->link == NULL)
        reader->link = copy_text(block + 157, length(block + 157, 100));
    if (reader->name == NULL || reader->link == NULL)
        return ENOMEM;
    size_t named = strlen(reader->name);
    switch (type) {
    case 0: case '0': case '7':
        entry->kind = named != 0 && reader->name[named - 1] == '/' ? TAR_FOLDER : TAR_FILE;
        break;
    case '1': entry->kind = TAR_HARDLINK; break;
    case '2': entry->kind = TAR_SYMLINK; break;
    case '5': entry->kind = TAR_FOLDER; break;
    case '6': entry->kind = TAR_FIFO; break;
    default: return EINVAL; /* devices, sparse files, and what we don't know */
    }
    if (named == 0 || !clean(reader->name) || (reader->name[0] == 0 && entry->kind != TAR_FOLDER))
        return EINVAL;
    if (entry->kind == TAR_HARDLINK && (!clean(reader->link) || reader->link[0] == 0))
        return EINVAL;
    if (entry->kind == TAR_SYMLINK && reader->link[0] == 0)
        return EINVAL;
    entry->name = reader->name;
    entry->link = reader->link;
    entry->mode = (unsigned)mode & 0777;
    entry->size = entry->kind != TAR_FILE ? 0 : reader->has_size ? reader->size : size;
    entry->mtime = reader->has_mtime ? reader->mtime : (int64_t)(mtime & INT64_MAX);
    entry->mtime_ns = reader->has_mtime ? reader->mtime_ns : 0;
    return entry->size > (uint64_t)INT64_MAX ? EINVAL : 0;
}

static bool is_zero(const uint8_t *block)
{
    for (size_t i = 0; i < TAR_BLOCK; i++)
        if (block[i] != 0)
            return false;
    return true;
}

static int take_header(struct tar_reader *reader)
{
    const uint8_t *block = reader->block;
    uint64_t size;
    if (is_zero(block)) {
        reader->state = TAR_AT_END;
        return reader->name != NULL || reader->link != NULL ? EINVAL : 0;
    }
    if (!checksum_fits(block) || !number(block + 124, 12, &size))
        return EINVAL;
    char type = (char)block[156];
    if (type == 'x' || type == 'X' || type == 'g' || type == 'L' || type == 'K')
        return begin_meta(reader, type, size);
    struct tar_entry entry;
    int error = fill_entry(reader, &entry, type);
    if (error == 0)
        error = reader->sink.entry(reader->sink.context, &entry);
    if (error != 0)
        return error;
    reader->left = entry.size;
    reader->padding = (TAR_BLOCK - entry.size % TAR_BLOCK) % TAR_BLOCK;
    forget(reader);
    reader->state = TAR_AT_DATA;
    return 0;
}

static int finish_part(struct tar_reader *reader)
{
    int error = reader->state == TAR_AT_META ? take_meta(reader) : reader->sink.end(reader->sink.context);
    reader->state = TAR_AT_HEADER;
    reader->filled = 0;
    return error;
}

int tar_feed(struct tar_reader *reader, const uint8_t *data, size_t size)
{
    int error = 0;
    while (error == 0) {
        if (reader->state == TAR_AT_END)
            return 0; /* what follows the end is padding */
        if (reader->state == TAR_AT_HEADER) {
            size_t piece = TAR_BLOCK - reader->filled;
            if (size == 0)
                return 0;
            if (piece > size)
                piece = size;
            memcpy(reader->block + reader->filled, data, piece);
            reader->filled += piece;
            data += piece;
            size -= piece;
            if (reader->filled == TAR_BLOCK) {
                reader->filled = 0;
                error = take_header(reader);
            }
            continue;
        }
        if (reader->left == 0 && reader->padding == 0) {
            error = finish_part(reader);
            continue;
        }
        if (size == 0)
            return 0;
        uint64_t *rest = reader->left != 0 ? &reader->left : &reader->padding;
        size_t piece = *rest < size ? (size_t)*rest : size;
        if (reader->left != 0 && reader->state == TAR_AT_META) {
            memcpy(reader->meta + reader->meta_size, data, piece);
            reader->meta_size += piece;
        } else if (reader->left != 0)
            error = reader->sink.data(reader->sink.context, data, piece);
        *rest -= piece;
        data += piece;
        size -= piece;
    }
    return error;
}

int tar_finish(struct tar_reader *reader)
{
    bool clean_end = reader->state == TAR_AT_END || (reader->state == TAR_AT_HEADER && reader->filled == 0);
    return clean_end && reader->name == NULL && reader->link == NULL ? 0 : EINVAL;
}
