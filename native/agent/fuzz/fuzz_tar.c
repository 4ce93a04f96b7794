/* A hostile tar stream, cut into pieces: no entry may leave the folder, however it is spelt. */
#include "tar.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct seen {
    uint64_t left;
    bool open;
    uint64_t sum;
};

static void check_name(const char *name, bool empty)
{
    size_t size = strlen(name);
    if (size > TAR_NAME_MAX || name[0] == '/' || (size == 0 && !empty))
        abort();
    for (const char *part = name; size != 0;) {
        size_t length = strcspn(part, "/");
        if (length == 0 || length > 255 || (length == 1 && part[0] == '.') || (length == 2 && memcmp(part, "..", 2) == 0))
            abort();
        if (part[length] == 0)
            break;
        part += length + 1;
    }
}

static int on_entry(void *context, const struct tar_entry *entry)
{
    struct seen *seen = context;
    if (seen->open || entry->mode > 0777 || entry->size > INT64_MAX)
        abort();
    check_name(entry->name, entry->kind == TAR_FOLDER);
    if (entry->kind == TAR_HARDLINK)
        check_name(entry->link, false);
    if (entry->kind != TAR_FILE && entry->size != 0)
        abort();
    seen->open = true;
    seen->left = entry->size;
    return 0;
}

static int on_data(void *context, const uint8_t *data, size_t size)
{
    struct seen *seen = context;
    if (!seen->open || size == 0 || size > seen->left)
        abort();
    for (size_t i = 0; i < size; i++)
        seen->sum += data[i];
    seen->left -= size;
    return 0;
}

static int on_end(void *context)
{
    struct seen *seen = context;
    if (!seen->open || seen->left != 0)
        abort();
    seen->open = false;
    return 0;
}

/* Fuzzers rarely guess a checksum: each block that could be a header gets the right one. */
static uint8_t *with_checksums(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size + 1);
    if (copy == NULL)
        return NULL;
    memcpy(copy, data, size);
    for (size_t at = 0; at + TAR_BLOCK <= size; at += TAR_BLOCK) {
        unsigned sum = 0;
        if (copy[at] == 0 || memcmp(copy + at + 257, "ustar", 5) != 0)
            continue;
        memset(copy + at + 148, ' ', 8);
        for (size_t i = 0; i < TAR_BLOCK; i++)
            sum += copy[at + i];
        for (int digit = 5; digit >= 0; digit--, sum >>= 3)
            copy[at + 148 + (size_t)digit] = (uint8_t)('0' + (sum & 7));
        copy[at + 154] = 0;
    }
    return copy;
}

static int read_all(const uint8_t *data, size_t size, size_t piece, struct seen *seen)
{
    struct tar_reader reader;
    const struct tar_sink sink = {on_entry, on_data, on_end, seen};
    int error = 0;
    tar_start(&reader, &sink);
    for (size_t at = 0; at < size && error == 0; at += piece)
        error = tar_feed(&reader, data + at, size - at < piece ? size - at : piece);
    if (error == 0)
        error = tar_finish(&reader);
    tar_free(&reader);
    return error;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *copy = with_checksums(data, size);
    struct seen whole = {0}, pieces = {0};
    if (copy == NULL)
        return 0;
    int first = read_all(copy, size, size != 0 ? size : 1, &whole);
    int second = read_all(copy, size, size % 97 + 1, &pieces);
    if ((first == 0) != (second == 0) || (first == 0 && whole.sum != pieces.sum))
        abort(); /* how a stream is cut must not matter */
    free(copy);
    return 0;
}
