/* cli/console/interrupt.h: SIGINT (Ctrl-C), SIGTERM and SIGHUP. The first signal stops the work at the next chunk, and
 * partial files are removed; the second ends the process at once. SIGPIPE is ignored, so that
 * writing to a closed pipe is an ordinary error. */
#ifndef OPAQ_CLI_CONSOLE_INTERRUPT_H
#define OPAQ_CLI_CONSOLE_INTERRUPT_H

#include <stdbool.h>

void interrupt_watch(void);

/* May be called from any thread. */
bool interrupt_seen(void);

#endif
