/* cli/report/html_report.h: a judgement as one page that needs nothing else: styles, drawings and the script are in it. */
#ifndef OPAQ_CLI_REPORT_HTML_REPORT_H
#define OPAQ_CLI_REPORT_HTML_REPORT_H

#include "cli/report/verify_judge.h"

void html_report(const struct weight_pairs *pairs, const struct judgement *judgement, struct text *page);

#endif
