/* The engine of the comparison: answers chat requests at once, and streams deltas at an even pace.
 *
 *     upstream PORT
 *
 * One thread, epoll. A body with "stream": true gets a stream, any other POST a chat completion, any GET a list of
 * models (routers ask for one). A stream's role chunk goes out with its first delta, its finish chunk and [DONE] with
 * its last: what a window counts is deltas, each of which is one send. Every delta carries when it was sent.
 *
 * POST /_bench?deltas=N&interval_us=N&event_bytes=N&in_step=0|1 says how streams that begin from then on look. In step,
 * all of them tick together, as the streams of an engine's batch do.
 *
 * For load that trusts it: requests without a content-length, or of more than 16 KB, are refused. */

#include "wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { IN_BYTES = 16384, EVENT_MAX = 4096, PENDING_MAX = 1 << 20, BATCH = 256 };

struct shape {
    int64_t interval_ns;
    int deltas;
    int event_bytes;
    bool in_step;
};

struct connection {
    int fd;
    size_t in_length;
    char *in;
    size_t pending_length; /* what the socket did not take */
    char *pending;
    bool streaming;
    struct shape shape; /* as it was when the stream began */
    int sent;
    int64_t due;
    struct connection *earlier, *later; /* in the list of streams by when their next delta is due */
};

static int epoll;
static struct shape shape = {.interval_ns = 20 * 1000000, .deltas = 16, .event_bytes = 200};
static struct connection *first, *last;

static const char STREAM_HEAD[] =
    "HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
    "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
#define EVENT_START "data: {\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1700000000," \
                    "\"model\":\"demo\",\"choices\":[{\"index\":0,\"delta\":"
static const char ROLE[] = EVENT_START "{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n";
static const char DELTA_START[] = EVENT_START "{\"content\":\"";
static const char DELTA_END[] = "\"},\"finish_reason\":null}]}\n\n";
static const char FINISH[] = EVENT_START "{},\"finish_reason\":\"stop\"}]}\n\n";
static const char DONE[] = "data: [DONE]\n\n";

static const char ANSWER[] =
    "{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"demo\",\"choices\":["
    "{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"This is " WHOLE ", of sixteen tokens or so, as an "
    "engine gives it to a short question.\"},\"logprobs\":null,\"finish_reason\":\"stop\"}],"
    "\"usage\":{\"prompt_tokens\":256,\"completion_tokens\":16,\"total_tokens\":272}}";
static const char MODELS[] =
    "{\"object\":\"list\",\"status\":\"ok\",\"data\":[{\"id\":\"demo\",\"object\":\"model\",\"created\":1700000000,"
    "\"owned_by\":\"bench\"}]}";

static void unlist(struct connection *c) {
    if (!c->streaming) return;
    c->streaming = false;
    *(c->earlier ? &c->earlier->later : &first) = c->later;
    *(c->later ? &c->later->earlier : &last) = c->earlier;
}

/* From the tail: streams of one pace are in order as they come. */
static void list(struct connection *c) {
    struct connection *before = last;
    while (before != NULL && before->due > c->due) before = before->earlier;
    c->streaming = true;
    c->earlier = before;
    c->later = before ? before->later : first;
    *(before ? &before->later : &first) = c;
    *(c->later ? &c->later->earlier : &last) = c;
}

static void leave(struct connection *c) {
    unlist(c);
    close(c->fd);
    free(c->in);
    free(c->pending);
    free(c);
}

static void watch(struct connection *c, uint32_t events, int operation) {
    struct epoll_event event = {.events = events, .data.ptr = c};
    if (epoll_ctl(epoll, operation, c->fd, &event) != 0) die("epoll_ctl: %s", strerror(errno));
}

/* False if the connection is of no use any more. */
static bool put(struct connection *c, const char *data, size_t length) {
    size_t taken = 0;
    if (c->pending_length == 0) {
        ssize_t sent = send(c->fd, data, length, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) return false;
        taken = sent < 0 ? 0 : (size_t)sent;
    }
    if (taken == length) return true;
    if (c->pending_length + length - taken > PENDING_MAX) return false;
    if (c->pending_length == 0) watch(c, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
    c->pending = must(realloc(c->pending, c->pending_length + length - taken));
    memcpy(c->pending + c->pending_length, data + taken, length - taken);
    c->pending_length += length - taken;
    return true;
}

static bool flush(struct connection *c) {
    ssize_t sent = send(c->fd, c->pending, c->pending_length, MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN;
    c->pending_length -= (size_t)sent;
    memmove(c->pending, c->pending + sent, c->pending_length);
    if (c->pending_length == 0) watch(c, EPOLLIN, EPOLL_CTL_MOD);
    return true;
}

static char *append(char *at, const char *text, size_t length) {
    memcpy(at, text, length);
    return at + length;
}

/* One HTTP chunk around `length` bytes, which `at` has room for. */
static char *append_chunk(char *at, const char *data, size_t length) {
    at += sprintf(at, "%zx\r\n", length);
    at = append(at, data, length);
    return append(at, "\r\n", 2);
}

/* The next delta, with what goes before the first and after the last. */
static bool put_delta(struct connection *c) {
    char out[2 * EVENT_MAX], event[EVENT_MAX + 1], *at = out;
    size_t fixed = sizeof DELTA_START - 1 + STAMP_BYTES + sizeof DELTA_END - 1;
    size_t fill = (size_t)c->shape.event_bytes > fixed ? (size_t)c->shape.event_bytes - fixed : 0;
    if (c->sent == 0) {
        at = append(at, STREAM_HEAD, sizeof STREAM_HEAD - 1);
        at = append_chunk(at, ROLE, sizeof ROLE - 1);
    }
    char *end = append(event, DELTA_START, sizeof DELTA_START - 1);
    end += sprintf(end, MARK "%0*lld#%0*d", STAMP_DIGITS, (long long)now_ns(), NUMBER_DIGITS, c->sent);
    memset(end, 'x', fill);
    end = append(end + fill, DELTA_END, sizeof DELTA_END - 1);
    at = append_chunk(at, event, (size_t)(end - event));
    if (++c->sent == c->shape.deltas) {
        at = append_chunk(at, FINISH, sizeof FINISH - 1);
        at = append_chunk(at, DONE, sizeof DONE - 1);
        at = append(at, "0\r\n\r\n", 5);
    }
    return put(c, out, (size_t)(at - out));
}

static bool put_json(struct connection *c, const char *status, const char *body) {
    char out[1024];
    int length = snprintf(out, sizeof out,
                          "HTTP/1.1 %s\r\ndate: Sun, 29 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
                          "content-length: %zu\r\ncontent-type: application/json\r\n\r\n%s",
                          status, strlen(body), body);
    return put(c, out, (size_t)length);
}

static long knob(const char *query, const char *name, long otherwise, long most) {
    const char *at = strstr(query, name);
    long value = at == NULL ? otherwise : strtol(at + strlen(name), NULL, 10);
    return value < 0 || value > most ? otherwise : value;
}

static void reshape(const char *head) {
    char query[512] = "";
    sscanf(head, "%*s %511s", query);
    shape.interval_ns = 1000 * knob(query, "interval_us=", shape.interval_ns / 1000, 3600 * 1000000L);
    shape.deltas = (int)knob(query, "deltas=", shape.deltas, 999999);
    shape.event_bytes = (int)knob(query, "event_bytes=", shape.event_bytes, EVENT_MAX - 256);
    shape.in_step = knob(query, "in_step=", shape.in_step, 1);
    if (shape.deltas < 1) shape.deltas = 1;
}

static void begin_stream(struct connection *c) {
    c->shape = shape;
    c->sent = 0;
    c->due = now_ns();
    list(c);
}

/* Every request that is there whole; those behind a stream wait for its end. */
static bool answer(struct connection *c) {
    while (!c->streaming) {
        size_t head = head_length(c->in, c->in_length), digits = 0, length = 0;
        if (head == 0) return c->in_length < IN_BYTES;
        const char *announced = header(c->in, head, "content-length:", &digits);
        if (announced != NULL) length = strtoul(announced, NULL, 10);
        bool post = memcmp(c->in, "POST ", 5) == 0;
        if ((post && announced == NULL) || head + length > IN_BYTES) {
            put_json(c, announced == NULL ? "411 Length Required" : "413 Content Too Large", "{}");
            return false;
        }
        if (c->in_length < head + length) return true;
        const char *body = c->in + head;
        bool well = true;
        if (strncmp(c->in, "POST /_bench?", 13) == 0) {
            reshape(c->in);
            well = put_json(c, "200 OK", "{}");
        } else if (!post) {
            well = put_json(c, "200 OK", MODELS);
        } else if (memmem(body, length, "\"stream\":true", 13) || memmem(body, length, "\"stream\": true", 14)) {
            begin_stream(c);
        } else {
            well = put_json(c, "200 OK", ANSWER);
        }
        c->in_length -= head + length;
        memmove(c->in, c->in + head + length, c->in_length);
        if (!well) return false;
    }
    return true;
}

static bool take(struct connection *c) {
    if (c->in_length == IN_BYTES) return false;
    ssize_t got = recv(c->fd, c->in + c->in_length, IN_BYTES - c->in_length, 0);
    if (got <= 0) return got < 0 && errno == EAGAIN;
    c->in_length += (size_t)got;
    c->in[c->in_length] = '\0';
    return answer(c);
}

static void welcome(int listener) {
    int fd, on = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        struct connection *c = must(calloc(1, sizeof *c));
        c->fd = fd;
        c->in = must(malloc(IN_BYTES + 1));
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        watch(c, EPOLLIN, EPOLL_CTL_ADD);
    }
}

/* Every delta that is due. The pace is by the schedule: a late delta does not delay the next. */
static void pace(void) {
    while (first != NULL && first->due <= now_ns()) {
        struct connection *c = first;
        unlist(c);
        if (!put_delta(c)) {
            leave(c);
        } else if (c->sent < c->shape.deltas) {
            c->due += c->shape.interval_ns;
            if (c->shape.in_step && c->shape.interval_ns > 0) c->due -= c->due % c->shape.interval_ns;
            list(c);
        } else if (!answer(c)) {
            leave(c);
        }
    }
}

int main(int argc, char **argv) {
    if (argc != 2) die("usage: upstream PORT");
    prepare_process();
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, 4096) != 0)
        die("port %s: %s", argv[1], strerror(errno));
    epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event accepting = {.events = EPOLLIN, .data.ptr = NULL}, events[BATCH];
    epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &accepting);
    for (;;) {
        int64_t wait = first == NULL ? NS_PER_S : first->due - now_ns();
        if (wait < 0) wait = 0;
        struct timespec limit = {.tv_sec = wait / NS_PER_S, .tv_nsec = wait % NS_PER_S};
        int count = epoll_pwait2(epoll, events, BATCH, &limit, NULL);
        if (count < 0 && errno != EINTR) die("epoll_pwait2: %s", strerror(errno));
        for (int i = 0; i < count; i++) {
            struct connection *c = events[i].data.ptr;
            if (c == NULL) {
                welcome(listener);
                continue;
            }
            bool well = true;
            if (events[i].events & EPOLLOUT) well = flush(c);
            if (well && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) well = take(c);
            if (!well) leave(c);
        }
        pace();
    }
}
