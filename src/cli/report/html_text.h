/* cli/report/html_text.h: texts from outside in HTML and SVG. */
#ifndef OPAQ_CLI_REPORT_HTML_TEXT_H
#define OPAQ_CLI_REPORT_HTML_TEXT_H

#include "cli/cli_memory.h"

/* Adds `text` so that it shows as it is, also within quotes. */
void html_escape(struct text *page, const char *text);

#endif
