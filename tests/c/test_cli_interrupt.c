/* test_cli_interrupt.c: signal handling of the command, each test in a separate process. */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "cli/console/interrupt.h"

/* The exit code of a process that runs `body`, or the negative number of the signal that ended it. */
static int ending_of(void (*body)(void)) {
    (void)fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        (void)signal(SIGINT, SIG_DFL); /* the parent of the tests may have changed the handlers */
        (void)signal(SIGHUP, SIG_DFL);
        body();
        _exit(0);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) {
        return 1000;
    }
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

static void first_then_second(void) {
    interrupt_watch();
    if (interrupt_seen()) {
        _exit(1);
    }
    (void)raise(SIGINT);
    if (!interrupt_seen()) {
        _exit(2);
    }
    (void)raise(SIGTERM);
}

static void the_second_ends_the_program(void) { CHECK_EQ_INT(ending_of(first_then_second), -SIGTERM); }

static void each_signal_is_handled(int number) {
    interrupt_watch();
    (void)raise(number);
    _exit(interrupt_seen() ? 7 : 0);
}
static void once_interrupt(void) { each_signal_is_handled(SIGINT); }
static void once_terminate(void) { each_signal_is_handled(SIGTERM); }
static void once_hang_up(void) { each_signal_is_handled(SIGHUP); }
static void once_pipe(void) { each_signal_is_handled(SIGPIPE); }

static void the_first_is_noticed(void) {
    CHECK_EQ_INT(ending_of(once_interrupt), 7);
    CHECK_EQ_INT(ending_of(once_terminate), 7);
    CHECK_EQ_INT(ending_of(once_hang_up), 7);
    CHECK_EQ_INT(ending_of(once_pipe), 0);
}

static void under_nohup(void) {
    (void)signal(SIGHUP, SIG_IGN);
    once_hang_up();
}

static void what_is_ignored_stays_ignored(void) { CHECK_EQ_INT(ending_of(under_nohup), 0); }

static const struct test_case tests[] = {TEST(the_first_is_noticed), TEST(the_second_ends_the_program),
                                         TEST(what_is_ignored_stays_ignored)};
TEST_MAIN(tests)
