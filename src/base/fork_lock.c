/* base/fork_lock.c: a mutex that is consistent across fork. */
#include "base/fork_lock.h"

#include <pthread.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void take(void) { (void)pthread_mutex_lock(&mutex); }

static void give(void) { (void)pthread_mutex_unlock(&mutex); }

/* If this fails for lack of memory, a fork may copy a held lock; nothing else changes. */
static void watch_forks(void) { (void)pthread_atfork(take, give, give); }

/* The first lock registers the fork handlers: before that, a fork finds the lock free. */
void fork_lock(void) {
    (void)pthread_once(&once, watch_forks);
    take();
}

void fork_unlock(void) { give(); }
