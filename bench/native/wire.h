/* What the load and the upstream share: the clock, giving up, and reading heads of HTTP/1.1. Linux only. */

#ifndef BENCH_WIRE_H
#define BENCH_WIRE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>

#define NS_PER_S 1000000000LL

/* A delta's text begins with when it was sent (CLOCK_MONOTONIC, ns) and its number in its stream. The mark survives
 * a proxy that parses an event and writes it anew. */
#define MARK "@@"
#define STAMP_DIGITS 19
#define NUMBER_DIGITS 6
#define STAMP_BYTES (2 + STAMP_DIGITS + 1 + NUMBER_DIGITS) /* @@<ns>#<number> */

/* In every answer that is no stream: it came through whole if this did, and its last brace. */
#define WHOLE "an answer in full"

static inline int64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * NS_PER_S + at.tv_nsec;
}

__attribute__((noreturn, format(printf, 1, 2))) static inline void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    exit(1);
}

static inline void *must(void *memory) {
    if (memory == NULL) die("out of memory");
    return memory;
}

/* Timers to the microsecond (the kernel's default slack is 50), and a file descriptor for each connection. */
static inline void prepare_process(void) {
    struct rlimit files;
    prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
}

/* The bytes of a head with its empty line, 0 if that has not come yet. */
static inline size_t head_length(const char *data, size_t length) {
    const char *end = memmem(data, length, "\r\n\r\n", 4);
    return end == NULL ? 0 : (size_t)(end - data) + 4;
}

/* The value of a header ("name:"), NULL if it is not there. `head` ends with its empty line. */
static inline const char *header(const char *head, size_t length, const char *name, size_t *value_length) {
    size_t wanted = strlen(name);
    const char *end = head + length;
    const char *line = memchr(head, '\n', length);
    while (line != NULL && ++line < end) {
        const char *next = memchr(line, '\n', (size_t)(end - line));
        if (next == NULL) return NULL;
        if ((size_t)(next - line) > wanted && strncasecmp(line, name, wanted) == 0) {
            const char *value = line + wanted;
            while (*value == ' ') value++;
            *value_length = (size_t)(next - value) - (next > value && next[-1] == '\r');
            return value;
        }
        line = next;
    }
    return NULL;
}

#endif
