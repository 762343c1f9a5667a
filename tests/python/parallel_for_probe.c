/* parallel_for_probe.c: wraps PyTorch's torch_parallel_for (LD_PRELOAD) and prints at exit the number of calls and of
 * threads that ran bodies. PROBE_FAIL makes it fail: "before" any work, or "after" it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void body_function(int64_t begin, int64_t end, void *context);
typedef int32_t parallel_for_function(int64_t begin, int64_t end, int64_t grain, body_function *body,
                                      void *context);

parallel_for_function torch_parallel_for;

struct wrapped {
    body_function *body;
    void *context;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_t threads[64];
static int thread_count;
static int calls;

static void note_thread(int64_t begin, int64_t end, void *context) {
    const struct wrapped *wrapped = context;
    int known = 0;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < thread_count; ++i) {
        known |= pthread_equal(threads[i], pthread_self());
    }
    if (!known && thread_count < 64) {
        threads[thread_count++] = pthread_self();
    }
    pthread_mutex_unlock(&mutex);
    wrapped->body(begin, end, wrapped->context);
}

static void report(void) { fprintf(stderr, "probe: %d calls on %d threads\n", calls, thread_count); }

int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, body_function *body, void *context) {
    if (calls++ == 0) {
        atexit(report);
    }
    const char *const failure = getenv("PROBE_FAIL");
    if (failure != NULL) {
        if (strcmp(failure, "after") == 0) {
            body(begin, begin + 1, context);
        }
        return 1;
    }
    void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD); /* Python loads it with RTLD_LOCAL */
    void *real = torch == NULL ? NULL : dlsym(torch, "torch_parallel_for");
    if (real == NULL) {
        return 1;
    }
    struct wrapped wrapped = {body, context};
    return (*(parallel_for_function **)&real)(begin, end, grain, note_thread, &wrapped);
}
