/* cli/report/verify_report.h: a judgement on stdout, for people or as JSON. */
#ifndef OPAQ_CLI_REPORT_VERIFY_REPORT_H
#define OPAQ_CLI_REPORT_VERIFY_REPORT_H

#include "cli/report/verify_judge.h"

void verify_print(const struct weight_pairs *pairs, const struct judgement *judgement, bool has_all);
enum exit_code verify_print_json(const struct command_call *call, const struct weight_pairs *pairs,
                                 const struct judgement *judgement);

/* "12, 7", or "3, 12, 7" in a stack: where the largest error lies; "-" if there is none. */
const char *error_place(const struct comparison *comparison, char *text, size_t bytes);

#endif
