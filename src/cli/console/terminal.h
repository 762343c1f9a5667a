/* cli/console/terminal.h: terminals: their size, and printing text that may come from a file. Control characters, which
 * terminals interpret, characters that change the direction of text (such as U+202A), line separators and invalid UTF-8
 * are printed as '?'. Depends on POSIX. */
#ifndef OPAQ_CLI_CONSOLE_TERMINAL_H
#define OPAQ_CLI_CONSOLE_TERMINAL_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

/* A terminal that a line can be drawn on again and again. */
bool terminal_is_drawable(int descriptor);

/* The columns of a terminal: as it says, else as the environment variable COLUMNS says, else 80. */
int terminal_columns(int descriptor);

/* The bytes of the character that begins here; 0 if it is not shown, and then `skipped` is the bytes of what it is. */
size_t shown_length(const char *text, size_t *skipped);

/* An unchecked text. */
void show_text(FILE *file, const char *text);

/* printf whose whole output is filtered, except newlines. */
void show(FILE *file, const char *format, ...) __attribute__((format(printf, 2, 3)));
void show_list(FILE *file, const char *format, va_list arguments) __attribute__((format(printf, 2, 0)));

#endif
