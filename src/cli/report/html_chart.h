/* cli/report/html_chart.h: drawings of a judgement, as SVG within a page. Colours are the page's: classes s0 to s9. */
#ifndef OPAQ_CLI_REPORT_HTML_CHART_H
#define OPAQ_CLI_REPORT_HTML_CHART_H

#include "cli/report/verify_judge.h"

#define CHART_COLOURS 10

/* Each adds a figure, or nothing if there is nothing to draw. */

/* The worst SQNR of each layer, a line for each sort of module. */
void chart_layers(const struct judgement *judgement, struct text *page);

/* How many weights have which SQNR, by kind. */
void chart_sqnr(const struct judgement *judgement, struct text *page);

/* How errors are distributed relative to the weights' rms, a line for each kind. */
void chart_errors(const struct judgement *judgement, struct text *page);

#endif
