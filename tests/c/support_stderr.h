/* support_stderr.h: captures what a part of a test writes to stderr. Depends on POSIX. */
#ifndef SUPPORT_STDERR_H
#define SUPPORT_STDERR_H

/* Redirects stderr to a temporary file, or to the descriptor `to` if that is not -1. */
void stderr_catch(int to);

/* Restores stderr. Returns the contents of the file, zero-terminated, to be released with free(); "" after a
 * descriptor of the caller. */
char *stderr_release(void);

#endif
