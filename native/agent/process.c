/* Commands: start, attach, signal, list, resize, remove, and what is kept of them. */
#include "process.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define FLAG_PTY 1u
#define FLAG_STDIN 2u
#define FLAG_DROP 4u
#define FLAG_ROOT 8u
#define FLAG_MERGE 16u
#define FLAG_DETACHED 32u
#define FLAG_ZYGOTE 64u
#define FLAGS_ALL 127u
#define NO_COPY (FLAG_PTY | FLAG_ROOT | FLAG_DETACHED | FLAG_ZYGOTE)
#define LIST_MAX 60000

struct process *processes;

static unsigned alive, ended;

static bool id_valid(const struct field *field)
{
    if (field->size < 1 || field->size > 64)
        return false;
    for (uint32_t i = 0; i < field->size; i++) {
        uint8_t c = field->data[i];
        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-'))
            return false;
    }
    return true;
}

static struct process *find(const struct field *id)
{
    for (struct process *process = processes; process != NULL; process = process->next)
        if (strlen(process->id) == id->size && memcmp(process->id, id->data, id->size) == 0)
            return process;
    return NULL;
}

static bool over(const struct process *process)
{
    return process->state == PROCESS_EXITED || process->state == PROCESS_KILLED;
}

static void process_free(struct process *process)
{
    readers_close(process);
    output_close(process);
    loop_close(&process->status);
    for (struct process **at = &processes; *at != NULL; at = &(*at)->next)
        if (*at == process) {
            *at = process->next;
            break;
        }
    if (over(process))
        ended--;
    else {
        child_forget(&process->child);
        alive--;
    }
    free(process->id);
    free(process->name);
    free(process);
}

static struct process *oldest_ended(bool with_memory)
{
    struct process *oldest = NULL;
    for (struct process *process = processes; process != NULL; process = process->next)
        if (over(process) && process->readers == NULL &&
            (!with_memory || process->out[0].ring.capacity || process->out[1].ring.capacity))
            oldest = process; /* newest first */
    return oldest;
}

bool processes_reclaim(void)
{
    struct process *process = oldest_ended(true);
    if (process == NULL)
        return false;
    for (unsigned i = 0; i < 2; i++)
        ring_forget(&process->out[i].ring);
    return true;
}

/* --- start --- */

struct request {
    struct field id, zygote;
    uint64_t flags, rows, columns, window, ring;
    char *block, *cwd;
    char **argv, **env;
    size_t argc, envc;
};

static void request_free(struct request *request)
{
    free(request->block);
    free(request->argv);
    free(request->env);
}

/* Numbers, and how many strings there are. */
static bool scan(struct request *request, const uint8_t *data, size_t size)
{
    struct fields list = fields_of(data, size);
    struct field field;
    bool right = true;
    while (fields_next(&list, &field)) {
        bool text = field.tag == 2 || field.tag == 3 || field.tag == 4;
        if (text && memchr(field.data, 0, field.size) != NULL)
            return false;
        switch (field.tag) {
        case 1: request->id = field; break;
        case 2: request->argc++; break;
        case 3: request->envc++; right = right && field.size != 0 && field.data[0] != '='; break;
        case 5: right = right && field_number(&field, &request->flags); break;
        case 6: right = right && field_number(&field, &request->rows); break;
        case 7: right = right && field_number(&field, &request->columns); break;
        case 8: right = right && field_number(&field, &request->window); break;
        case 9: right = right && field_number(&field, &request->ring); break;
        case 10: request->zygote = field; right = right && id_valid(&field); break;
        default: break;
        }
    }
    uint64_t flags = request->flags;
    if (flags & FLAG_ZYGOTE && (flags & (FLAG_PTY | FLAG_STDIN | FLAG_ROOT)) != FLAG_STDIN)
        return false;
    if (request->zygote.size != 0 && (flags & (NO_COPY | FLAG_STDIN)) != FLAG_STDIN)
        return false;
    return right && id_valid(&request->id) && request->argc != 0 && !(request->flags & ~(uint64_t)FLAGS_ALL) &&
           request->rows <= 65535 && request->columns <= 65535 && request->window <= UINT32_MAX &&
           request->ring >= RING_MIN && request->ring <= RING_MAX;
}

/* The strings are used where they lie in one copy of the fields: each gets its NUL where the next head was. */
static bool collect(struct request *request, const uint8_t *data, size_t size)
{
    request->block = malloc(size + 1);
    request->argv = calloc(request->argc + 1, sizeof *request->argv);
    request->env = calloc(request->envc + 1, sizeof *request->env);
    if (request->block == NULL || request->argv == NULL || request->env == NULL)
        return false;
    memcpy(request->block, data, size);
    struct fields list = fields_of(data, size);
    struct field field;
    size_t argc = 0, envc = 0;
    while (fields_next(&list, &field)) {
        char *text = request->block + (field.data - data);
        if (field.tag < 2 || field.tag > 4)
            continue;
        text[field.size] = 0;
        if (field.tag == 2)
            request->argv[argc++] = text;
        else if (field.tag == 3)
            request->env[envc++] = text;
        else
            request->cwd = text;
    }
    return true;
}

static uint64_t wall_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void send_pid(struct process *process)
{
    struct channel *channel = process->starter;
    process->starter = NULL;
    if (channel == NULL)
        return;
    uint8_t bytes[32];
    struct writer out = writer_of(bytes, sizeof bytes);
    write_number(&out, 1, (uint64_t)process->child.pid);
    if (process->copied)
        write_number(&out, 2, 1);
    if (process->detached)
        channel_reply_end(channel, &out);
    else {
        channel_reply(channel, &out);
        if (((const struct reader *)channel->owner)->mute)
            reader_muted(channel->owner);
    }
}

static void running(struct process *process)
{
    process->state = PROCESS_RUNNING;
    send_pid(process);
    readers_pump(process);
}

void process_failed(struct process *process, int error, const char *step)
{
    struct channel *channel = process->starter;
    process->starter = NULL;
    if (channel != NULL) {
        if (channel->ops != NULL && channel->ops->ended != NULL)
            channel->ops->ended(channel); /* its reader goes, the channel stays for the error */
        channel->ops = NULL;
        channel_error(channel, error, step);
    }
    process_free(process);
}

/* The child has either reported a failing step, or its end of the pipe closed by a successful exec. */
void process_resolve(struct process *process)
{
    uint32_t words[2];
    int error = 0;
    const char *step = "zygote";
    if (process->asked_ns != 0)
        error = copy_take(process);
    else {
        ssize_t got = read(process->status.fd, words, sizeof words);
        if (got < 0 && (errno == EAGAIN || errno == EINTR))
            error = -1;
        else if (got == (ssize_t)sizeof words)
            error = (int)words[0], step = spawn_step(words[1]);
    }
    if (error < 0)
        return;
    loop_close(&process->status);
    if (error != 0)
        process_failed(process, error, step);
    else
        running(process);
}

static void status_ready(struct source *source, uint32_t events)
{
    (void)events;
    process_resolve((struct process *)((char *)source - offsetof(struct process, status)));
}

static void process_ended(struct child *child, int status, const struct rusage *usage)
{
    struct process *process = (struct process *)((char *)child - offsetof(struct process, child));
    if (process->state == PROCESS_STARTING) {
        const struct process *before = process;
        process_resolve(process);
        bool there = false;
        for (struct process *at = processes; at != NULL && !there; at = at->next)
            there = at == before;
        if (!there)
            return;
    }
    process->state = WIFSIGNALED(status) ? PROCESS_KILLED : PROCESS_EXITED;
    process->code = WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
    process->user_us = (uint64_t)usage->ru_utime.tv_sec * 1000000u + (uint64_t)usage->ru_utime.tv_usec;
    process->system_us = (uint64_t)usage->ru_stime.tv_sec * 1000000u + (uint64_t)usage->ru_stime.tv_usec;
    process->resident = (uint64_t)usage->ru_maxrss * 1024u;
    alive--;
    ended++;
    output_drain(process);
    input_settle(process);
    readers_pump(process);
    if (ended > RECORDS_MAX) {
        struct process *oldest = oldest_ended(false);
        if (oldest != NULL)
            process_free(oldest);
    }
}

static void detached_ended(struct channel *channel)
{
    ((struct process *)channel->owner)->starter = NULL;
}

static const struct channel_ops detached_ops = {.ended = detached_ended};

static struct process *process_new(const struct request *request)
{
    struct process *process = calloc(1, sizeof *process);
    if (process == NULL)
        return NULL;
    process->id = field_text(&request->id, false);
    process->name = strdup(request->argv[0]);
    if (process->id == NULL || process->name == NULL) {
        free(process->id);
        free(process->name);
        free(process);
        return NULL;
    }
    process->state = PROCESS_STARTING;
    process->pty = request->flags & FLAG_PTY;
    process->drop = request->flags & FLAG_DROP;
    process->detached = request->flags & FLAG_DETACHED;
    process->zygote = request->flags & FLAG_ZYGOTE;
    process->status.fd = process->in.fd = process->out[0].source.fd = process->out[1].source.fd = -1;
    process->out[0].process = process->out[1].process = process;
    process->started_ns = wall_ns();
    process->child.ended = process_ended;
    return process;
}

/* Returns 0 or an errno; `*step` then says where. On success the channel belongs to the process. */
static int start(struct channel *channel, const struct request *request, const char **step)
{
    static const uint64_t origin[2];
    struct spawned spawned;
    struct spawn plan = {
        .argv = request->argv, .cwd = request->cwd != NULL ? request->cwd : config.workdir,
        .pty = request->flags & FLAG_PTY, .stdin_open = request->flags & FLAG_STDIN,
        .merge = request->flags & FLAG_MERGE, .as_root = request->flags & FLAG_ROOT,
        .rows = (uint16_t)request->rows, .columns = (uint16_t)request->columns, .zygote = request->flags & FLAG_ZYGOTE,
    };
    int zygote = request->zygote.size != 0 ? copy_from(find(&request->zygote)) : -1;
    if (request->zygote.size != 0 && zygote < 0) {
        *step = "zygote";
        return ESRCH;
    }
    *step = "memory";
    struct process *process = process_new(request);
    if (process == NULL)
        return ENOMEM;
    process->next = processes;
    processes = process;
    alive++;
    int error = ENOMEM;
    plan.envp = environment_build(request->env, request->envc);
    if (plan.envp == NULL)
        error = errno;
    else if (process->detached || reader_add(process, channel, origin, request->window, false))
        error = zygote < 0 ? spawn_start(&plan, &spawned, step) : spawn_ask(&plan, zygote, &spawned, step);
    free(plan.envp);
    if (error != 0) {
        if (channel->ops != NULL)
            channel->ops->ended(channel);
        channel->ops = NULL;
        process_free(process);
        return error;
    }
    if (process->detached) {
        channel->ops = &detached_ops;
        channel->owner = process;
    }
    process->starter = channel;
    if (zygote < 0)
        child_watch(&process->child, spawned.pid);
    else
        copy_wait(process);
    output_start(process, spawned.out, spawned.err, spawned.in, (size_t)request->ring);
    process->status = (struct source){.fd = spawned.status, .ready = status_ready};
    loop_arm(&process->status, EPOLLIN);
    return 0;
}

void process_start(struct channel *channel, const uint8_t *data, size_t size)
{
    struct request request = {.rows = 24, .columns = 80, .window = GUEST_WINDOW, .ring = RING_DEFAULT};
    const char *step = NULL;
    int error = 0;
    if (!scan(&request, data, size))
        error = EINVAL;
    else if (find(&request.id) != NULL)
        error = EEXIST, step = "id";
    else if (request.flags & FLAG_ROOT && !config.root)
        error = EPERM, step = "root";
    else if (alive >= PROCESSES_MAX)
        error = EAGAIN, step = "processes";
    else if (!collect(&request, data, size))
        error = ENOMEM;
    else
        error = start(channel, &request, &step);
    request_free(&request);
    if (error != 0)
        channel_error(channel, error, step);
}

/* --- the rest --- */

struct arguments {
    struct field id;
    unsigned known;      /* bit mask of the tags that are numbers here */
    uint64_t numbers[9]; /* by tag */
};

static bool parse(struct arguments *arguments, const uint8_t *data, size_t size, const struct field **id)
{
    struct fields list = fields_of(data, size);
    struct field field;
    *id = NULL;
    while (fields_next(&list, &field)) {
        if (field.tag == 1) {
            arguments->id = field;
            *id = &arguments->id;
            if (!id_valid(&field))
                return false;
        } else if (field.tag < 9 && arguments->known >> field.tag & 1 && !field_number(&field, &arguments->numbers[field.tag]))
            return false;
    }
    return true;
}

/* Finds the process that the operation names, or answers the error. */
static struct process *named(struct channel *channel, struct arguments *arguments, const uint8_t *data, size_t size)
{
    const struct field *id;
    if (!parse(arguments, data, size, &id) || id == NULL) {
        channel_error(channel, EINVAL, "fields");
        return NULL;
    }
    struct process *process = find(id);
    if (process == NULL)
        channel_error(channel, ENOENT, "process");
    return process;
}

void process_attach(struct channel *channel, const uint8_t *data, size_t size)
{
    struct arguments arguments = {.known = 0x11c, .numbers = {[8] = GUEST_WINDOW}};
    struct process *process = named(channel, &arguments, data, size);
    if (process == NULL)
        return;
    uint64_t from[2], window = arguments.numbers[8];
    for (unsigned i = 0; i < 2; i++) {
        const struct ring *ring = &process->out[i].ring;
        from[i] = arguments.numbers[i + 2];
        if (from[i] < ring->start)
            from[i] = ring->start;
        else if (from[i] > ring->end)
            from[i] = ring->end;
    }
    if (window > UINT32_MAX || arguments.numbers[4] > 3) {
        channel_error(channel, EINVAL, "fields");
        return;
    }
    if (arguments.numbers[4] & 2)
        readers_mute(process);
    if (!reader_add(process, channel, from, window, arguments.numbers[4] & 1)) {
        channel_error(channel, ENOMEM, "reader");
        return;
    }
    channel->host_offset = process->in_taken;
    uint8_t bytes[64];
    struct writer out = writer_of(bytes, sizeof bytes);
    write_number(&out, 1, (uint64_t)process->child.pid);
    write_number(&out, 2, from[0]);
    write_number(&out, 3, from[1]);
    write_number(&out, 4, process->in_taken);
    channel_reply(channel, &out);
    readers_pump(process);
}

void process_signal(struct channel *channel, const uint8_t *data, size_t size)
{
    struct arguments arguments = {.known = 0xc, .numbers = {[3] = 1}};
    const struct field *id;
    bool right = parse(&arguments, data, size, &id);
    uint64_t number = arguments.numbers[2], scope = arguments.numbers[3];
    int error = 0;
    if (!right || number < 1 || number > 64 || scope > 2 || (scope == 2) != (id == NULL))
        error = EINVAL;
    else if (scope == 2)
        error = kill(-1, (int)number) < 0 && errno != ESRCH ? errno : 0;
    else {
        struct process *process = find(id);
        if (process == NULL)
            error = ENOENT;
        else if (over(process))
            error = ESRCH;
        else if (process->child.pid <= 0)
            error = EAGAIN; /* no process yet, and certainly not ours */
        else if (kill(scope == 1 && process->state == PROCESS_RUNNING ? -process->child.pid : process->child.pid,
                      (int)number) < 0) /* before it runs it may not have its group yet */
            error = errno;
    }
    if (error != 0)
        channel_error(channel, error, "signal");
    else
        channel_reply_end(channel, NULL);
}

static void write_record(struct writer *out, const struct process *process)
{
    uint8_t bytes[512];
    struct writer record = writer_of(bytes, sizeof bytes);
    unsigned state = process->state == PROCESS_STARTING ? PROCESS_RUNNING : process->state;
    size_t name = strlen(process->name);
    write_bytes(&record, 1, process->id, strlen(process->id));
    write_number(&record, 2, (uint64_t)process->child.pid);
    write_number(&record, 3, state);
    write_number(&record, 4, (uint64_t)process->code);
    write_number(&record, 5, process->out[0].ring.end);
    write_number(&record, 6, process->out[1].ring.end);
    write_bytes(&record, 7, process->name, name > 256 ? 256 : name);
    write_number(&record, 8, process->started_ns);
    write_bytes(out, 1, bytes, record.size);
}

void process_list(struct channel *channel, const uint8_t *data, size_t size)
{
    (void)data;
    (void)size;
    uint8_t *bytes = malloc(LIST_MAX);
    if (bytes == NULL) {
        channel_error(channel, ENOMEM, "list");
        return;
    }
    struct writer out = writer_of(bytes, LIST_MAX - 13);
    for (const struct process *process = processes; process != NULL && !out.full; process = process->next)
        write_record(&out, process);
    bool truncated = out.full;
    out.capacity = LIST_MAX;
    out.full = false;
    if (truncated)
        write_number(&out, 2, 1);
    channel_reply_end(channel, &out);
    free(bytes);
}

void process_resize(struct channel *channel, const uint8_t *data, size_t size)
{
    struct arguments arguments = {.known = 0xc, .numbers = {[2] = 24, [3] = 80}};
    struct process *process = named(channel, &arguments, data, size);
    if (process == NULL)
        return;
    struct winsize window = {.ws_row = (uint16_t)arguments.numbers[2], .ws_col = (uint16_t)arguments.numbers[3]};
    int error = 0;
    if (arguments.numbers[2] > 65535 || arguments.numbers[3] > 65535)
        error = EINVAL;
    else if (!process->pty)
        error = ENOTTY;
    else if (process->out[0].source.fd < 0)
        error = ESRCH;
    else if (ioctl(process->out[0].source.fd, TIOCSWINSZ, &window) < 0)
        error = errno;
    else if (terminals_silent) {
        pid_t group = 0;
        if (ioctl(process->out[0].source.fd, TIOCGPGRP, &group) < 0 || group <= 1)
            group = process->child.pid;
        kill(-group, SIGWINCH);
    }
    if (error != 0)
        channel_error(channel, error, "resize");
    else
        channel_reply_end(channel, NULL);
}

void process_remove(struct channel *channel, const uint8_t *data, size_t size)
{
    struct arguments arguments = {.known = 0};
    struct process *process = named(channel, &arguments, data, size);
    if (process == NULL)
        return;
    if (!over(process)) {
        channel_error(channel, EBUSY, "process");
        return;
    }
    process_free(process);
    channel_reply_end(channel, NULL);
}
