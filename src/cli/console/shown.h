/* cli/console/shown.h: printing texts that come from outside. Control characters, which terminals obey, characters that change
 * the direction of text (U+202A and its like), line separators and bytes that are no UTF-8 become '?'. */
#ifndef OPAQ_CLI_CONSOLE_SHOWN_H
#define OPAQ_CLI_CONSOLE_SHOWN_H

#include <stdarg.h>
#include <stdio.h>

/* The bytes of the character that begins here; 0 if it is not shown, and then `skipped` is the bytes of what it is. */
size_t shown_length(const char *text, size_t *skipped);

/* An unchecked text. */
void show_text(FILE *file, const char *text);

/* printf whose whole output is filtered, except newlines. */
void show(FILE *file, const char *format, ...) __attribute__((format(printf, 2, 3)));
void show_list(FILE *file, const char *format, va_list arguments) __attribute__((format(printf, 2, 0)));

#endif
