/* base/fork_lock.c: a lock that forks respect. */
#include "base/fork_lock.h"

#include <pthread.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void take(void) { (void)pthread_mutex_lock(&mutex); }

static void give(void) { (void)pthread_mutex_unlock(&mutex); }

/* Without memory for it forks are as dangerous as they were; nothing else changes. */
static void watch_forks(void) { (void)pthread_atfork(take, give, give); }

/* The first one to lock arranges it: a fork before that finds the lock free. */
void fork_lock(void) {
    (void)pthread_once(&once, watch_forks);
    take();
}

void fork_unlock(void) { give(); }
