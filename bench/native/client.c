/* The load of the comparison: chat requests over kept-alive connections, each answer checked, each delta timed.
 *
 *     client --port N --body FILE [--connections N] [--rate N] [--warm S] [--seconds S] [--ramp S] [--once | --hold]
 *            [--deltas N --interval-us N] [--cpu-of PID,PID]
 *
 * One thread, epoll. With a rate, connections take turns at an even pace and a time counts from when its request was
 * due, so that a slow answer hides nothing; without, each sends its next request when the last answer is whole.
 * --deltas says that answers are streams, and how long ones. --once sends one request on each connection; --hold opens
 * one stream on each, says "held" when all have begun, and stays until its input ends.
 *
 * The window begins `warm` seconds after the first request and lasts `seconds`. What came in it is counted (of --once,
 * whole streams and first deltas too, though they end after it and begin before it), and the CPU that the processes of
 * --cpu-of used in it is read from their clocks (the kernel's sum over their threads, which /proc/<pid>/stat shows in
 * ticks). After it, what is under way is waited for: every answer is read to its end.
 *
 * Any answer that is not as the upstream sent it ends the load with exit code 1: status, framing, a delta lost, doubled
 * or out of order, no finish reason, no [DONE]. Figures go to stdout as JSON. */

#include "wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { HEAD_MAX = 16384, LINE_MAX_BYTES = 8192, READ_BYTES = 65536, BATCH = 256, CPUS_MAX = 64 };
enum { SAMPLES_MAX = 50 * 1000 * 1000 };
static const int64_t DRAIN_NS = 20 * NS_PER_S;

enum part { IDLE, HEAD, BODY_LENGTH, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER };

struct connection {
    int fd, number;
    enum part part;
    int64_t due;      /* of the request under way: its times count from here */
    int owed;         /* requests that became due while one was under way */
    int64_t owed_due; /* when the first of them was */
    size_t missing;   /* of the body, or of a chunk */
    bool close_after, is_stream, finished, done;
    int deltas;
    int64_t last_delta, longest_gap;
    size_t text_length; /* of the head, then of a line of the stream or of the body */
    char *text, *request;
    char framing[64]; /* a line of the chunked coding, as far as it came */
    size_t framing_length;
    size_t request_length;
};

struct samples {
    int64_t *values;
    size_t count, room;
};

static struct {
    int port, connections, deltas;
    double rate, warm_s, seconds, ramp_s;
    int64_t interval_ns;
    bool once, hold;
} ask = {.connections = 64, .warm_s = 0.5, .seconds = 2.0};

static struct connection *connections;
static int epoll, under_way, begun;
static bool in_window, over;
static struct samples request_times, first_times, delta_times;
static long requests, deltas, streams, even_streams; /* in the window */
static clockid_t cpus[CPUS_MAX];
static int cpu_count;

static void fail(const struct connection *c, const char *what) {
    int shown = c->text_length > 300 ? 300 : (int)c->text_length;
    die("connection %d: %s; what it got last: %.*s", c->number, what, shown, c->text);
}

static void sample(struct samples *samples, int64_t value) {
    if (samples->count == SAMPLES_MAX) return;
    if (samples->count == samples->room) {
        samples->room = samples->room ? 2 * samples->room : 4096;
        samples->values = must(realloc(samples->values, samples->room * sizeof value));
    }
    samples->values[samples->count++] = value;
}

static void join(struct connection *c) {
    int on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)ask.port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&address, sizeof address) != 0)
        die("connection %d to port %d: %s", c->number, ask.port, strerror(errno));
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &event) != 0) die("epoll_ctl: %s", strerror(errno));
}

static void send_request(struct connection *c, int64_t due) {
    if (c->fd < 0) join(c);
    c->part = HEAD;
    c->due = due;
    c->is_stream = c->finished = c->done = c->close_after = false;
    c->deltas = 0;
    c->longest_gap = 0;
    c->text_length = 0;
    under_way++;
    /* Blocking, and small enough for any socket's buffer. */
    if (send(c->fd, c->request, c->request_length, MSG_NOSIGNAL) != (ssize_t)c->request_length)
        fail(c, "the request could not be sent");
}

/* A request is due: now, or as soon as the one under way is answered. */
static void become_due(struct connection *c, int64_t due) {
    if (c->part == IDLE) {
        send_request(c, due);
    } else if (c->owed++ == 0) {
        c->owed_due = due;
    }
}

static void add_text(struct connection *c, const char *data, size_t length, size_t room) {
    if (c->text_length + length > room) fail(c, "a head, line or answer too long");
    memcpy(c->text + c->text_length, data, length);
    c->text_length += length;
}

static int64_t digits(const char *text, int count) {
    int64_t value = 0;
    for (int i = 0; i < count; i++) {
        if (text[i] < '0' || text[i] > '9') return -1;
        value = 10 * value + text[i] - '0';
    }
    return value;
}

static void take_event(struct connection *c, const char *line, size_t length, int64_t now) {
    if (c->done) fail(c, "an event after [DONE]");
    if (memmem(line, length, "[DONE]", 6) != NULL) {
        c->done = true;
        return;
    }
    const char *mark = memmem(line, length, MARK, 2);
    if (mark != NULL) {
        if (mark + STAMP_BYTES > line + length || mark[2 + STAMP_DIGITS] != '#') fail(c, "a damaged delta");
        int64_t sent = digits(mark + 2, STAMP_DIGITS), number = digits(mark + 3 + STAMP_DIGITS, NUMBER_DIGITS);
        if (number != c->deltas) fail(c, "a delta lost, doubled or out of order");
        if (c->deltas++ == 0) {
            begun++;
            if (in_window || ask.once) sample(&first_times, now - c->due);
        } else if (now - c->last_delta > c->longest_gap) {
            c->longest_gap = now - c->last_delta;
        }
        c->last_delta = now;
        if (in_window) sample(&delta_times, now - sent);
        deltas += in_window;
    }
    c->finished |= memmem(line, length, "\"finish_reason\":\"stop\"", 22) != NULL;
    c->finished |= memmem(line, length, "\"finish_reason\": \"stop\"", 23) != NULL;
}

static void take_body(struct connection *c, const char *data, size_t length, int64_t now) {
    if (!c->is_stream) {
        add_text(c, data, length, HEAD_MAX);
        return;
    }
    while (length > 0) {
        const char *newline = memchr(data, '\n', length);
        size_t part = newline == NULL ? length : (size_t)(newline - data);
        if (newline == NULL || c->text_length > 0) add_text(c, data, part, LINE_MAX_BYTES);
        if (newline == NULL) return;
        const char *line = c->text_length > 0 ? c->text : data;
        size_t line_length = c->text_length > 0 ? c->text_length : part;
        if (line_length > 5 && memcmp(line, "data:", 5) == 0) take_event(c, line, line_length, now);
        c->text_length = 0;
        data += part + 1;
        length -= part + 1;
    }
}

static void leave(struct connection *c) {
    close(c->fd);
    c->fd = -1;
}

/* JSON whose every brace is closed, the first one last; the upstream writes none within strings. */
static bool is_balanced(const char *text, size_t length) {
    int depth = 0;
    size_t at = 0;
    while (at < length && (at == 0 || depth > 0)) {
        depth += (text[at] == '{') - (text[at] == '}');
        at++;
    }
    return length > 0 && depth == 0 && text[0] == '{' && strspn(text + at, " \r\n") >= length - at;
}

/* The answer is whole: is it what was sent? */
static void end_answer(struct connection *c, int64_t now) {
    bool counted = in_window || ask.once;
    if (ask.deltas > 0) {
        if (!c->is_stream) fail(c, "no event stream");
        if (c->deltas != ask.deltas || !c->finished || !c->done) fail(c, "a stream that is not whole");
        streams += counted;
        even_streams += counted && c->longest_gap <= 10 * ask.interval_ns;
    } else {
        if (!is_balanced(c->text, c->text_length) || !memmem(c->text, c->text_length, WHOLE, sizeof WHOLE - 1))
            fail(c, "an answer that is not whole");
    }
    requests += counted;
    if (counted) sample(&request_times, now - c->due);
    c->part = IDLE;
    under_way--;
    if (c->close_after) leave(c);
    if (over || ask.once || ask.hold) return;
    if (ask.rate == 0) {
        send_request(c, now);
    } else if (c->owed > 0) {
        c->owed--;
        int64_t due = c->owed_due;
        c->owed_due += (int64_t)(ask.connections / ask.rate * NS_PER_S);
        send_request(c, due);
    }
}

static void take_head(struct connection *c, size_t length) {
    size_t value_length;
    if (length < 13 || memcmp(c->text, "HTTP/1.1 200 ", 13) != 0) fail(c, "not 200");
    const char *value = header(c->text, length, "connection:", &value_length);
    c->close_after = value != NULL && value_length == 5 && strncasecmp(value, "close", 5) == 0;
    value = header(c->text, length, "content-type:", &value_length);
    c->is_stream = value != NULL && value_length >= 17 && strncasecmp(value, "text/event-stream", 17) == 0;
    value = header(c->text, length, "content-length:", &value_length);
    c->missing = value == NULL ? 0 : strtoul(value, NULL, 10);
    c->part = value != NULL ? BODY_LENGTH : CHUNK_SIZE;
    if (value == NULL && header(c->text, length, "transfer-encoding:", &value_length) == NULL) fail(c, "no framing");
    c->text_length = 0;
}

/* A whole line of the framing, without its line end. */
static void take_line(struct connection *c, const char *line, size_t length, int64_t now) {
    if (c->part == CHUNK_SIZE) {
        char *end;
        c->missing = strtoul(line, &end, 16);
        if (end == line) fail(c, "no chunk size");
        c->part = c->missing == 0 ? TRAILER : CHUNK_DATA;
    } else if (c->part == CHUNK_END) {
        if (length != 0) fail(c, "a chunk longer than it said");
        c->part = CHUNK_SIZE;
    } else if (length == 0) {
        end_answer(c, now);
    }
}

static size_t take_framing(struct connection *c, const char *data, size_t length, int64_t now) {
    size_t part = 0;
    while (part < length && data[part] != '\n') {
        if (c->framing_length == sizeof c->framing - 1) fail(c, "a line of the framing too long");
        c->framing[c->framing_length++] = data[part++];
    }
    if (part == length) return part;
    size_t line_length = c->framing_length;
    if (line_length > 0 && c->framing[line_length - 1] == '\r') line_length--;
    c->framing[line_length] = '\0';
    c->framing_length = 0;
    take_line(c, c->framing, line_length, now);
    return part + 1;
}

/* Reads on in an answer; gives how many bytes it took. */
static size_t take(struct connection *c, const char *data, size_t length, int64_t now) {
    size_t before = c->text_length, part = length;
    switch (c->part) {
    case IDLE:
        fail(c, "bytes that nobody asked for");
        break;
    case HEAD:
        if (part > HEAD_MAX - before) part = HEAD_MAX - before;
        add_text(c, data, part, HEAD_MAX);
        size_t head = head_length(c->text, c->text_length);
        if (head == 0) {
            if (c->text_length == HEAD_MAX) fail(c, "a head too long");
            return part;
        }
        take_head(c, head);
        if (c->part == BODY_LENGTH && c->missing == 0) end_answer(c, now);
        return head - before;
    case BODY_LENGTH:
    case CHUNK_DATA:
        if (part > c->missing) part = c->missing;
        take_body(c, data, part, now);
        c->missing -= part;
        if (c->missing > 0) break;
        if (c->part == CHUNK_DATA) {
            c->part = CHUNK_END;
        } else {
            end_answer(c, now);
        }
        break;
    case CHUNK_SIZE:
    case CHUNK_END:
    case TRAILER:
        return take_framing(c, data, length, now);
    }
    return part;
}

static void receive(struct connection *c) {
    static char data[READ_BYTES];
    ssize_t got = recv(c->fd, data, sizeof data, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    int64_t now = now_ns();
    if (got <= 0) {
        if (c->part != IDLE) fail(c, got == 0 ? "closed within an answer" : strerror(errno));
        leave(c);
        return;
    }
    size_t at = 0;
    while (at < (size_t)got) at += take(c, data + at, (size_t)got - at, now);
}

static double cpu_s(void) {
    double sum = 0;
    for (int i = 0; i < cpu_count; i++) {
        struct timespec at;
        if (clock_gettime(cpus[i], &at) != 0) die("the CPU clock of a process: %s; has it ended?", strerror(errno));
        sum += (double)at.tv_sec + (double)at.tv_nsec / NS_PER_S;
    }
    return sum;
}

static int ascending(const void *left, const void *right) {
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

static double at_share(const struct samples *samples, double share) {
    return (double)samples->values[(size_t)(share * (double)(samples->count - 1))] / 1000.0;
}

static void print_times(const char *name, struct samples *samples) {
    if (samples->count == 0) return;
    qsort(samples->values, samples->count, sizeof *samples->values, ascending);
    printf(", \"%s\": {\"count\": %zu, \"p50\": %.1f, \"p90\": %.1f", name, samples->count, at_share(samples, 0.5),
           at_share(samples, 0.9));
    printf(", \"p99\": %.1f, \"max\": %.1f}", at_share(samples, 0.99), at_share(samples, 1.0));
}

static char *read_file(const char *path, size_t *length) {
    FILE *file = fopen(path, "rb");
    char *data = must(malloc(HEAD_MAX));
    if (file == NULL) die("%s: %s", path, strerror(errno));
    *length = fread(data, 1, HEAD_MAX, file);
    fclose(file);
    return data;
}

static void prepare(const char *body_path) {
    size_t length;
    char *body = read_file(body_path, &length);
    connections = must(calloc((size_t)ask.connections, sizeof *connections));
    for (int i = 0; i < ask.connections; i++) {
        struct connection *c = &connections[i];
        c->number = i;
        c->fd = -1;
        c->text = must(calloc(1, HEAD_MAX + 1));
        c->request = must(malloc(length + 512));
        int head = sprintf(c->request,
                           "POST /v1/chat/completions HTTP/1.1\r\nhost: engine:8000\r\nuser-agent: bench/1\r\n"
                           "accept: */*\r\ncontent-type: application/json\r\nauthorization: Bearer sk-bench\r\n"
                           "x-request-id: b%d\r\nx-session-id: s%d\r\ncontent-length: %zu\r\n\r\n",
                           i, i, length);
        memcpy(c->request + head, body, length);
        c->request_length = (size_t)head + length;
        join(c);
    }
    free(body);
}

/* Until `until`, or until something came. */
static void wait_and_receive(int64_t until) {
    struct epoll_event events[BATCH];
    int64_t wait = until - now_ns();
    if (wait < 0) wait = 0;
    struct timespec limit = {.tv_sec = wait / NS_PER_S, .tv_nsec = wait % NS_PER_S};
    int count = epoll_pwait2(epoll, events, BATCH, &limit, NULL);
    if (count < 0 && errno != EINTR) die("epoll_pwait2: %s", strerror(errno));
    for (int i = 0; i < count; i++) receive(events[i].data.ptr);
}

/* When request number `k` of all is due: at the rate, or as the connections' starts are spread over the ramp. */
static int64_t due_at(int64_t start, long k) {
    double s = ask.rate > 0 ? (double)k / ask.rate : ask.ramp_s * (double)k / ask.connections;
    return start + (int64_t)(s * NS_PER_S);
}

static void hold(void) {
    int64_t start = now_ns();
    long k = 0;
    while (begun < ask.connections) {
        int64_t now = now_ns();
        if (now > start + (int64_t)(ask.ramp_s * NS_PER_S) + DRAIN_NS)
            die("%d of %d streams began", begun, ask.connections);
        while (k < ask.connections && due_at(start, k) <= now) become_due(&connections[k++], now);
        wait_and_receive(k < ask.connections ? due_at(start, k) : now + NS_PER_S / 10);
    }
    puts("held");
    fflush(stdout);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL}, events[BATCH];
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, STDIN_FILENO, &event) != 0) die("--hold wants a pipe as its input");
    for (;;) {
        int count = epoll_wait(epoll, events, BATCH, -1);
        for (int i = 0; i < count; i++) {
            if (events[i].data.ptr == NULL) return;
            receive(events[i].data.ptr);
        }
    }
}

static void run(void) {
    int64_t start = now_ns(), from = start + (int64_t)(ask.warm_s * NS_PER_S);
    int64_t to = from + (int64_t)(ask.seconds * NS_PER_S), opened = 0, closed = 0;
    int64_t longest = ask.deltas * ask.interval_ns + DRAIN_NS;
    double used = 0, own = 0;
    long k = 0, starts = ask.rate > 0 ? (long)(ask.rate * (ask.warm_s + ask.seconds)) : ask.connections;
    for (;;) {
        int64_t now = now_ns();
        if (!opened && now >= from) {
            opened = now;
            in_window = true;
            used = cpu_s();
            own = (double)clock() / CLOCKS_PER_SEC;
        }
        if (opened && !closed && now >= to) {
            closed = now;
            in_window = false;
            over = true;
            used = cpu_s() - used;
            own = (double)clock() / CLOCKS_PER_SEC - own;
        }
        if (closed && under_way == 0) break;
        if (now > to + longest)
            die("%d answers are still under way %lld s after the window", under_way, (long long)(longest / NS_PER_S));
        while (!over && k < starts && due_at(start, k) <= now) {
            become_due(&connections[k % ask.connections], due_at(start, k));
            k++;
        }
        int64_t next = !opened ? from : !closed ? to : now + NS_PER_S / 10;
        if (!over && k < starts && due_at(start, k) < next) next = due_at(start, k);
        wait_and_receive(next);
    }
    double seconds = (double)(closed - opened) / NS_PER_S;
    printf("{\"seconds\": %.6f, \"requests\": %ld, \"deltas\": %ld", seconds, requests, deltas);
    printf(", \"cpu_s\": %.6f, \"load_cpu_s\": %.6f", used, own);
    if (ask.deltas > 0) printf(", \"streams\": %ld, \"even_streams\": %ld", streams, even_streams);
    print_times("request_us", &request_times);
    print_times("first_us", &first_times);
    print_times("delta_us", &delta_times);
    printf("}\n");
}

static void read_cpus(char *list) {
    for (char *each = strtok(list, ","); each != NULL; each = strtok(NULL, ",")) {
        if (cpu_count == CPUS_MAX) die("too many processes in --cpu-of");
        if (clock_getcpuclockid(atoi(each), &cpus[cpu_count++]) != 0) die("no process %s", each);
    }
}

int main(int argc, char **argv) {
    enum { PORT = 256, BODY, CONNECTIONS, RATE, WARM, SECONDS, RAMP, ONCE, HOLD, DELTAS, INTERVAL, CPU_OF };
    static const struct option options[] = {
        {"port", 1, NULL, PORT},       {"body", 1, NULL, BODY},       {"connections", 1, NULL, CONNECTIONS},
        {"rate", 1, NULL, RATE},       {"warm", 1, NULL, WARM},       {"seconds", 1, NULL, SECONDS},
        {"ramp", 1, NULL, RAMP},       {"once", 0, NULL, ONCE},       {"hold", 0, NULL, HOLD},
        {"deltas", 1, NULL, DELTAS},   {"interval-us", 1, NULL, INTERVAL}, {"cpu-of", 1, NULL, CPU_OF},
        {NULL, 0, NULL, 0},
    };
    const char *body = NULL;
    int option;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case PORT: ask.port = atoi(optarg); break;
        case BODY: body = optarg; break;
        case CONNECTIONS: ask.connections = atoi(optarg); break;
        case RATE: ask.rate = atof(optarg); break;
        case WARM: ask.warm_s = atof(optarg); break;
        case SECONDS: ask.seconds = atof(optarg); break;
        case RAMP: ask.ramp_s = atof(optarg); break;
        case ONCE: ask.once = true; break;
        case HOLD: ask.hold = true; break;
        case DELTAS: ask.deltas = atoi(optarg); break;
        case INTERVAL: ask.interval_ns = 1000LL * atoi(optarg); break;
        case CPU_OF: read_cpus(optarg); break;
        default: return 2;
        }
    }
    if (ask.port == 0 || body == NULL || ask.connections < 1) die("--port, --body and a connection are needed");
    prepare_process();
    epoll = epoll_create1(EPOLL_CLOEXEC);
    prepare(body);
    if (ask.hold) {
        hold();
    } else {
        run();
    }
    return 0;
}
