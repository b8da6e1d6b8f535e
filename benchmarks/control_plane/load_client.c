// A load client for servers that stream chat completions: one thread, epoll, HTTP/1.1 with kept connections.
//
//   load_client HOST PORT CONNECTIONS SECONDS RATE TOKENS TEXT QUICKACK SEED REQUEST RECORDS
//
// RATE 0: a closed loop of CONNECTIONS requests at a time. Else an open loop: Poisson arrivals at RATE per
// second, over as many connections as it takes up to CONNECTIONS; times count from the planned arrival, so a
// server that falls behind cannot hide its queue.
// REQUEST is a file with the whole request; a run of '#' in it becomes the number of the request, counted from
// SEED * 1000000.
// RECORDS takes one `struct record` per request. A response is right when its status is 200, its text is TEXT
// (unless that is empty), its usage tells TOKENS output tokens, its finish_reason is "length", and [DONE] ends it.
// QUICKACK 1: every read is acknowledged at once (TCP_QUICKACK).
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { CAPACITY = 1 << 18, TEXT_CAPACITY = 1 << 14, LATE_SECONDS = 10 };

struct record {
    double planned, first, last, end; // seconds since the start; 0: it did not come
    uint32_t events;                  // events with text
    uint32_t fault;                   // 0: right; else the number of an entry of FAULTS
};

static const char *const FAULTS[] = {"",           "status",       "text",   "tokens", "finish_reason", "no [DONE]",
                                     "error event", "cut off", "too long", "not answered in time", "not connected"};
enum fault { RIGHT, STATUS, TEXT, TOKENS, FINISH, NOT_DONE, ERROR_EVENT, CUT, TOO_LONG, LATE, UNCONNECTED };

struct connection {
    int fd;
    size_t sent, size;    // of the request; of `raw`
    size_t at;            // bytes of `raw` that have been read
    size_t body, scanned; // bytes of `text stream`, and how far events have been taken from it
    long length;          // of the body; -1: chunked; -2: the head is not complete
    long chunk;           // bytes left of the present chunk
    int status, done, finish_right, tokens, busy, whole;
    size_t text_size;
    struct record record;
    char *raw, *stream, *text, *request;
    struct connection *next_free;
};

static struct {
    struct sockaddr_in address;
    int limit, opened, tokens, quickack, epoll, in_flight;
    double seconds, rate;
    const char *text;
    char *request;
    size_t request_size, mark, mark_size;
    FILE *records;
    unsigned long number, faults;
    struct connection *free, **all;
    double *backlog; // planned arrivals that wait for a connection
    size_t backlog_at, backlog_size, backlog_capacity;
    uint64_t random;
    struct timespec begin;
} run;

static _Noreturn void die(const char *what) {
    fprintf(stderr, "error: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)(t.tv_sec - run.begin.tv_sec) + (double)(t.tv_nsec - run.begin.tv_nsec) / 1e9;
}

static double exponential(double mean) { // xorshift64* (Vigna 2016)
    run.random ^= run.random >> 12, run.random ^= run.random << 25, run.random ^= run.random >> 27;
    double uniform = (double)((run.random * 0x2545F4914F6CDD1DULL) >> 11) / 9007199254740992.0;
    return -mean * log1p(-uniform);
}

static void set_option(int fd, int option, int value) {
    setsockopt(fd, IPPROTO_TCP, option, &value, sizeof value);
}

static void watch(struct connection *c, int operation, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = c};
    if (epoll_ctl(run.epoll, operation, c->fd, &event) < 0) die("epoll_ctl");
}

static int connect_again(struct connection *c) {
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c->fd < 0) die("socket");
    set_option(c->fd, TCP_NODELAY, 1);
    if (connect(c->fd, (struct sockaddr *)&run.address, sizeof run.address) < 0) {
        close(c->fd), c->fd = -1;
        usleep(1000); // else a closed loop would fail a million times a second
        return 0;
    }
    watch(c, EPOLL_CTL_ADD, EPOLLIN);
    return 1;
}

static struct connection *new_connection(void) {
    struct connection *c = calloc(1, sizeof *c);
    if (!c || !(c->raw = malloc(CAPACITY)) || !(c->stream = malloc(CAPACITY + 1)) ||
        !(c->text = malloc(TEXT_CAPACITY)) || !(c->request = malloc(run.request_size)))
        die("malloc");
    memcpy(c->request, run.request, run.request_size);
    c->fd = -1;
    run.all[run.opened++] = c;
    return c;
}

static void finish(struct connection *c, enum fault fault) {
    c->record.end = now(), c->record.fault = fault, c->busy = 0;
    if (fault != RIGHT && run.faults++ < 3)
        fprintf(stderr, "fault: %s; status %d: %.300s\n", FAULTS[fault], c->status, c->body ? c->stream : "");
    fwrite(&c->record, sizeof c->record, 1, run.records);
    run.in_flight--;
    if (c->fd >= 0 && (fault != RIGHT)) close(c->fd), c->fd = -1;
    c->next_free = run.free, run.free = c;
}

static void send_rest(struct connection *c) {
    while (c->sent < run.request_size) {
        ssize_t n = send(c->fd, c->request + c->sent, run.request_size - c->sent, MSG_NOSIGNAL);
        if (n <= 0) return finish(c, CUT); // the socket blocks: requests are small
        c->sent += (size_t)n;
    }
}

static void begin(struct connection *c, double planned) {
    char digits[32];
    c->record = (struct record){.planned = planned};
    c->sent = c->size = c->at = c->body = c->scanned = c->text_size = 0;
    c->length = -2, c->chunk = 0, c->status = c->done = c->finish_right = c->whole = 0, c->tokens = -1;
    c->busy = 1, run.in_flight++;
    snprintf(digits, sizeof digits, "%0*lu", (int)run.mark_size, run.number++);
    memcpy(c->request + run.mark, digits, run.mark_size);
    if (c->fd < 0 && !connect_again(c)) return finish(c, UNCONNECTED);
    send_rest(c);
}

static void add_text(struct connection *c, const char *from, const char *end) {
    while (from < end && *from != '"' && c->text_size < TEXT_CAPACITY) {
        if (*from == '\\' && from + 1 < end) c->text[c->text_size++] = *from++;
        if (c->text_size < TEXT_CAPACITY) c->text[c->text_size++] = *from++;
    }
}

static const char *value_of(const char *event, size_t size, const char *key) {
    const char *found = memmem(event, size, key, strlen(key));
    return found ? found + strlen(key) : NULL;
}

static void take_event(struct connection *c, const char *event, size_t size) {
    const char *end = event + size, *value;
    if (!value_of(event, size, "data:")) return; // a comment
    if (value_of(event, size, "data: [DONE]")) {
        c->done = 1;
        return;
    }
    if (value_of(event, size, "{\"error\"") || value_of(event, size, "event: error"))
        c->record.fault = ERROR_EVENT;
    if ((value = value_of(event, size, "\"content\":\"")) && *value != '"') {
        add_text(c, value, end);
        c->record.last = now(), c->record.events++;
        if (c->record.first == 0) c->record.first = c->record.last;
    }
    if ((value = value_of(event, size, "\"finish_reason\":\"")))
        c->finish_right = end - value >= 7 && !memcmp(value, "length\"", 7);
    if ((value = value_of(event, size, "\"completion_tokens\":"))) c->tokens = atoi(value);
}

static void take_events(struct connection *c) {
    c->stream[c->body] = 0;
    for (;;) {
        char *from = c->stream + c->scanned;
        char *gap = memmem(from, c->body - c->scanned, "\n\n", 2);
        if (!gap) return;
        take_event(c, from, (size_t)(gap - from));
        c->scanned = (size_t)(gap - c->stream) + 2;
    }
}

static int take_head(struct connection *c) {
    char *end = memmem(c->raw, c->size, "\r\n\r\n", 4), *length;
    if (!end) return 0;
    *end = 0;
    c->status = c->size > 12 ? atoi(c->raw + 9) : 0;
    c->length = (length = strcasestr(c->raw, "content-length:")) ? atol(length + 15) : -1;
    c->at = (size_t)(end - c->raw) + 4;
    return 1;
}

static void take_bytes(struct connection *c, size_t count) {
    memcpy(c->stream + c->body, c->raw + c->at, count);
    c->body += count, c->at += count;
}

static void take_chunks(struct connection *c) {
    while (c->at < c->size) {
        if (c->chunk > 0) {
            size_t left = c->size - c->at, count = (size_t)c->chunk < left ? (size_t)c->chunk : left;
            take_bytes(c, count);
            c->chunk -= (long)count;
            if (c->chunk == 0) c->chunk = -2; // the end of line behind it
        } else {
            char *line = memmem(c->raw + c->at, c->size - c->at, "\r\n", 2);
            if (!line) return;
            size_t after = (size_t)(line - c->raw) + 2;
            if (c->chunk == -2) {
                c->at = after, c->chunk = 0;
                continue;
            }
            long size = strtol(c->raw + c->at, NULL, 16);
            if (size == 0) {
                c->whole = c->size >= after + 2;
                return;
            }
            c->at = after, c->chunk = size;
        }
    }
}

static enum fault judge(const struct connection *c) {
    if (c->status != 200) return STATUS;
    if (c->record.fault) return (enum fault)c->record.fault;
    if (!c->done) return NOT_DONE;
    if (!c->finish_right) return FINISH;
    if (c->tokens != run.tokens) return TOKENS;
    if (*run.text && (strlen(run.text) != c->text_size || memcmp(run.text, c->text, c->text_size))) return TEXT;
    return RIGHT;
}

static void receive(struct connection *c) {
    ssize_t n = recv(c->fd, c->raw + c->size, CAPACITY - c->size, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
        close(c->fd), c->fd = -1; // where nothing was asked, the next request connects again
        if (c->busy) finish(c, CUT);
        return;
    }
    if (run.quickack) set_option(c->fd, TCP_QUICKACK, 1);
    if (!c->busy) return;
    c->size += (size_t)n;
    if (c->length == -2 && !take_head(c)) return;
    if (c->length == -1) {
        take_chunks(c);
    } else {
        take_bytes(c, c->size - c->at);
        c->whole = c->body >= (size_t)c->length;
    }
    take_events(c);
    if (c->whole) return finish(c, judge(c));
    if (c->size == CAPACITY) finish(c, TOO_LONG);
}

static struct connection *free_connection(void) {
    if (!run.free) return run.opened < run.limit ? new_connection() : NULL;
    struct connection *c = run.free;
    run.free = c->next_free;
    return c;
}

static void arrive(double planned) {
    if (run.backlog_size == run.backlog_capacity) {
        run.backlog_capacity = run.backlog_capacity ? 2 * run.backlog_capacity : 1024;
        if (!(run.backlog = realloc(run.backlog, run.backlog_capacity * sizeof *run.backlog))) die("realloc");
    }
    run.backlog[run.backlog_size++] = planned;
}

static void start_waiting(void) {
    struct connection *c;
    while (run.backlog_at < run.backlog_size && (c = free_connection())) begin(c, run.backlog[run.backlog_at++]);
}

static void wait_for_events(double until) {
    struct epoll_event events[256];
    double left = until - now();
    struct timespec timeout = {0};
    if (left > 0) timeout.tv_sec = (time_t)left, timeout.tv_nsec = (long)((left - (double)timeout.tv_sec) * 1e9);
    int count = epoll_pwait2(run.epoll, events, 256, &timeout, NULL);
    if (count < 0 && errno != EINTR) die("epoll_wait");
    for (int i = 0; i < count; i++) receive(events[i].data.ptr);
}

static void open_loop(void) {
    double next = exponential(1 / run.rate);
    while (now() < run.seconds || next < run.seconds) {
        while (next <= now() && next < run.seconds) arrive(next), next += exponential(1 / run.rate);
        start_waiting();
        wait_for_events(next < run.seconds ? next : run.seconds);
    }
    while ((run.in_flight || run.backlog_at < run.backlog_size) && now() < run.seconds + LATE_SECONDS) {
        start_waiting();
        if (run.in_flight) wait_for_events(run.seconds + LATE_SECONDS); // where nobody listens, nothing is
    }
}

static void closed_loop(void) {
    while (now() < run.seconds || (run.in_flight && now() < run.seconds + LATE_SECONDS)) {
        struct connection *c;
        while (now() < run.seconds && (c = free_connection())) begin(c, now());
        if (now() < run.seconds) wait_for_events(run.seconds);
        else if (run.in_flight) wait_for_events(run.seconds + LATE_SECONDS);
    }
}

static void read_request(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) die(path);
    run.request = malloc(1 << 20);
    run.request_size = fread(run.request, 1, 1 << 20, file);
    fclose(file);
    char *mark = memmem(run.request, run.request_size, "####", 4);
    if (!mark) return;
    run.mark = (size_t)(mark - run.request);
    while (run.mark_size < 18 && mark[run.mark_size] == '#') run.mark_size++;
}

int main(int count, char **words) {
    if (count != 12) {
        fprintf(stderr, "error: load_client takes 11 arguments; its source says which.\n");
        return 1;
    }
    run.address = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(words[2]))};
    if (inet_pton(AF_INET, words[1], &run.address.sin_addr) != 1) die("the address is not an IPv4 address");
    run.limit = atoi(words[3]), run.seconds = atof(words[4]), run.rate = atof(words[5]);
    run.tokens = atoi(words[6]), run.text = words[7], run.quickack = atoi(words[8]);
    run.random = strtoull(words[9], NULL, 10) * 2 + 1, run.number = strtoul(words[9], NULL, 10) * 1000000;
    read_request(words[10]);
    if (!(run.records = fopen(words[11], "wb"))) die(words[11]);
    if (!(run.all = calloc((size_t)run.limit, sizeof *run.all))) die("calloc");
    if ((run.epoll = epoll_create1(EPOLL_CLOEXEC)) < 0) die("epoll_create1");
    clock_gettime(CLOCK_MONOTONIC, &run.begin);
    run.rate > 0 ? open_loop() : closed_loop();
    for (int i = 0; i < run.opened; i++)
        if (run.all[i]->busy) finish(run.all[i], LATE);
    for (; run.backlog_at < run.backlog_size; run.backlog_at++) {
        struct record record = {.planned = run.backlog[run.backlog_at], .fault = LATE};
        fwrite(&record, sizeof record, 1, run.records);
    }
    return fclose(run.records) ? 1 : 0;
}
