/* cli/command_pending.c: commands that are not there yet. */
#include "cli/commands.h"

static enum exit_code pending(const struct command_call *call) {
    complain(call, "this command is not there yet");
    return EXIT_TROUBLE;
}

enum exit_code run_diff(const struct command_call *call) { return pending(call); }
