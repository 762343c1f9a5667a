/* cli/console/interrupt.h: Ctrl-C and its relatives (SIGINT, SIGTERM, SIGHUP). The first asks the work to stop at the next
 * chunk, and what is half written is then removed; the second ends the program at once. SIGPIPE is ignored, so that
 * writing to a closed pipe is an error like others. */
#ifndef OPAQ_CLI_CONSOLE_INTERRUPT_H
#define OPAQ_CLI_CONSOLE_INTERRUPT_H

#include <stdbool.h>

void interrupt_watch(void);

/* From any thread. */
bool interrupt_seen(void);

#endif
