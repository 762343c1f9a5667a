/* cli/report/verify_report.h: a judgement for people, as JSON, and as an HTML page that shows the same JSON. */
#ifndef OPAQ_CLI_REPORT_VERIFY_REPORT_H
#define OPAQ_CLI_REPORT_VERIFY_REPORT_H

#include <yyjson.h>

#include "cli/report/verify_judge.h"

/* Prints tables to stdout: the worst weights, or all of them, and the kinds. */
void verify_print(const struct weight_pairs *pairs, const struct judgement *judgement, bool has_all);

/* The document that --json prints; released by the caller. */
yyjson_mut_doc *verify_json(const struct weight_pairs *pairs, const struct judgement *judgement);

/* Adds the page to `page`: the template verify_report.html with the JSON in it. False after a message on stderr. */
bool verify_page(const struct command_call *call, const struct weight_pairs *pairs,
                 const struct judgement *judgement, struct text *page);

/* verify_report.html; the build makes this text from the file (cmake/embed_text.cmake). */
extern const char verify_report_html[];

#endif
