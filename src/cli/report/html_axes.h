/* cli/report/html_axes.h: the frame of a drawing: axes, ticks, a legend. */
#ifndef OPAQ_CLI_REPORT_HTML_AXES_H
#define OPAQ_CLI_REPORT_HTML_AXES_H

#include "cli/cli_memory.h"

enum {
    CHART_WIDTH = 960,
    CHART_HEIGHT = 320,
    CHART_LEFT = 56,
    CHART_RIGHT = 944,
    CHART_TOP = 16,
    CHART_BOTTOM = 276
};

struct axis {
    double low;
    double high;
    double step; /* between ticks */
};

/* An axis whose ends are multiples of a round step, about `ticks` of them. */
struct axis axis_over(double low, double high, int ticks);
double axis_x(const struct axis *axis, double value);
double axis_y(const struct axis *axis, double value);

/* How a tick is labelled. */
enum tick_style { TICK_NUMBER, TICK_PERCENT, TICK_POWER_OF_TWO };

/* From <figure> up to and with the axes; closed by chart_end. Titles are the program's own texts. */
void chart_begin(struct text *page, const char *title, const char *about, const struct axis *x,
                 enum tick_style x_style, const char *x_label, const struct axis *y, enum tick_style y_style,
                 const char *y_label);
void chart_end(struct text *page);

/* A legend after the drawing: begun after chart_begin's drawing was closed by legend_begin. */
void legend_begin(struct text *page);
void legend_item(struct text *page, size_t colour, const char *name);

#endif
