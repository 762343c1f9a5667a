/* cli/console/terminal.h: terminals: their size, and printing text that may come from a file. Control characters, which
 * terminals interpret, characters that change the direction of text (such as U+202A), line separators and invalid UTF-8
 * are printed as '?'. Depends on POSIX. */
#ifndef OPAQ_CLI_CONSOLE_TERMINAL_H
#define OPAQ_CLI_CONSOLE_TERMINAL_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

/* Whether the descriptor is a terminal on which a line can be redrawn. */
bool terminal_is_drawable(int descriptor);

/* Width of the terminal in columns: from the terminal, else from the environment variable COLUMNS, else 80. */
int terminal_columns(int descriptor);

/* Length in bytes of the character that begins here; 0 if it must not be printed. `skipped` is its length either way. */
size_t shown_length(const char *text, size_t *skipped);

/* Prints text that has not been checked. */
void show_text(FILE *file, const char *text);

/* printf with filtered output; newlines are kept. */
void show(FILE *file, const char *format, ...) __attribute__((format(printf, 2, 3)));
void show_list(FILE *file, const char *format, va_list arguments) __attribute__((format(printf, 2, 0)));

#endif
