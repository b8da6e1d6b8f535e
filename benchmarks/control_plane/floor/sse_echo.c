// A server that answers every HTTP/1.1 request with the same response: what a stream costs where nothing is computed.
//
//     sse_echo PORT RESPONSE EACH
//
// RESPONSE: a file with the whole response, chunked. EACH: 1: a write for each event, as a stream has; 0: one for all.
// One thread, epoll, kept connections. Prints a line once it listens; runs until it is killed.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { CAPACITY = 1 << 16, RESPONSE_CAPACITY = 1 << 20 };

struct connection {
    int fd;
    size_t size;
    char bytes[CAPACITY];
};

static char response[RESPONSE_CAPACITY];
static size_t response_size;
static int each;

static _Noreturn void die(const char *what) {
    fprintf(stderr, "error: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int send_all(int fd, const char *from, size_t size) {
    while (size) {
        ssize_t n = send(fd, from, size, MSG_NOSIGNAL); // the socket blocks: responses are small
        if (n <= 0) return 0;
        from += n, size -= (size_t)n;
    }
    return 1;
}

static int answer(int fd) {
    const char *from = response, *end = response + response_size;
    if (!each) return send_all(fd, from, response_size);
    while (from < end) {
        const char *gap = memmem(from, (size_t)(end - from), "\n\n\r\n", 4); // the end of an event and of its chunk
        size_t size = gap ? (size_t)(gap - from) + 4 : (size_t)(end - from);
        if (!send_all(fd, from, size)) return 0;
        from += size;
    }
    return 1;
}

// The size of the first whole request in the bytes; 0: it has not come yet.
static size_t request_size(const struct connection *c) {
    char *end = memmem(c->bytes, c->size, "\r\n\r\n", 4);
    if (!end) return 0;
    char head[CAPACITY];
    size_t head_size = (size_t)(end - c->bytes) + 4;
    memcpy(head, c->bytes, head_size - 1), head[head_size - 1] = 0;
    char *length = strcasestr(head, "content-length:");
    size_t whole = head_size + (length ? strtoul(length + 15, NULL, 10) : 0);
    return c->size >= whole ? whole : 0;
}

static int receive(struct connection *c) {
    ssize_t n = recv(c->fd, c->bytes + c->size, CAPACITY - c->size, 0);
    if (n <= 0) return 0;
    c->size += (size_t)n;
    for (size_t whole; (whole = request_size(c));) {
        memmove(c->bytes, c->bytes + whole, c->size - whole), c->size -= whole;
        if (!answer(c->fd)) return 0;
    }
    return c->size < CAPACITY;
}

static void take(int listener, int epoll) {
    struct connection *c = calloc(1, sizeof *c);
    if (!c) die("calloc");
    if ((c->fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC)) < 0) die("accept");
    int on = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &event) < 0) die("epoll_ctl");
}

int main(int count, char **words) {
    if (count != 4) return fprintf(stderr, "error: sse_echo takes 3 arguments; its source says which.\n"), 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(words[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    FILE *file = fopen(words[2], "rb");
    if (!file) die(words[2]);
    response_size = fread(response, 1, sizeof response, file), fclose(file);
    each = atoi(words[3]);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1, epoll = epoll_create1(EPOLL_CLOEXEC);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) < 0 || listen(listener, 1024) < 0) die("listen");
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (epoll < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event) < 0) die("epoll");
    puts("serving"), fflush(stdout);
    for (;;) {
        struct epoll_event events[256];
        int ready = epoll_wait(epoll, events, 256, -1);
        if (ready < 0 && errno != EINTR) die("epoll_wait");
        for (int i = 0; i < ready; i++) {
            struct connection *c = events[i].data.ptr;
            if (!c) take(listener, epoll);
            else if (!receive(c)) close(c->fd), free(c);
        }
    }
}
