/* Reading tar streams (ustar, GNU long names, pax) piece by piece: no I/O, every byte may be hostile. */
#ifndef RINGFENCE_TAR_H
#define RINGFENCE_TAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TAR_BLOCK 512
#define TAR_META_MAX (1u << 20) /* pax records or a long name of one entry */
#define TAR_NAME_MAX 4095

enum tar_kind { TAR_FILE, TAR_HARDLINK, TAR_SYMLINK, TAR_FOLDER, TAR_FIFO };

struct tar_entry {
    enum tar_kind kind;
    const char *name; /* checked: relative, without "..", "." parts and doubled slashes; "" is the folder itself */
    const char *link; /* of a hard link checked in the same way; of a symlink as it came */
    unsigned mode;    /* 0 to 0777 */
    uint64_t size;    /* of a file */
    int64_t mtime;
    uint32_t mtime_ns;
};

/* Each returns 0 or an errno, which ends the reading. `data` comes only for files. */
struct tar_sink {
    int (*entry)(void *context, const struct tar_entry *entry);
    int (*data)(void *context, const uint8_t *data, size_t size);
    int (*end)(void *context); /* of the entry's bytes; also when it has none */
    void *context;
};

struct tar_reader {
    struct tar_sink sink;
    enum { TAR_AT_HEADER, TAR_AT_DATA, TAR_AT_META, TAR_AT_END } state;
    uint8_t block[TAR_BLOCK];
    size_t filled;
    uint64_t left, padding;
    char meta_type;
    char *meta;
    size_t meta_size;
    char *name, *link;  /* from pax or GNU headers, for the next entry */
    bool has_size, has_mtime;
    uint64_t size;
    int64_t mtime;
    uint32_t mtime_ns;
};

void tar_start(struct tar_reader *reader, const struct tar_sink *sink);
int tar_feed(struct tar_reader *reader, const uint8_t *data, size_t size);
int tar_finish(struct tar_reader *reader); /* EINVAL where the stream ends within an entry */
void tar_free(struct tar_reader *reader);

#endif
