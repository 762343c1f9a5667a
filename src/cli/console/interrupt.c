/* cli/console/interrupt.c: see interrupt.h. */
#include "cli/console/interrupt.h"

#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>

static atomic_int seen;

static void note_signal(int number) {
    if (atomic_exchange(&seen, 1) != 0) {
        (void)signal(number, SIG_DFL);
        (void)raise(number); /* delivered when this handler returns */
    }
}

/* Signals that are ignored already stay ignored: nohup, background jobs of a script. */
static void watch_signal(int number) {
    struct sigaction action;
    if (sigaction(number, NULL, &action) != 0 || action.sa_handler == SIG_IGN) {
        return;
    }
    action = (struct sigaction){.sa_handler = note_signal, .sa_flags = SA_RESTART};
    (void)sigemptyset(&action.sa_mask);
    (void)sigaction(number, &action, NULL);
}

void interrupt_watch(void) {
    watch_signal(SIGINT);
    watch_signal(SIGTERM);
    watch_signal(SIGHUP);
    (void)signal(SIGPIPE, SIG_IGN);
    (void)signal(SIGXFSZ, SIG_IGN); /* exceeding the file size limit makes the write fail instead */
}

bool interrupt_seen(void) { return atomic_load_explicit(&seen, memory_order_relaxed) != 0; }
