/* support_stderr.h: what a piece of a test writes to stderr. Depends on POSIX. */
#ifndef SUPPORT_STDERR_H
#define SUPPORT_STDERR_H

/* From here on stderr goes to a file of its own, or to the descriptor `to` if that is not -1. */
void stderr_catch(int to);

/* Gives stderr back. Returns what came into the file, terminated, to be released with free(); with a descriptor of the
 * caller's "". */
char *stderr_release(void);

#endif
