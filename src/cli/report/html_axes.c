/* cli/report/html_axes.c: see html_axes.h. */
#include "cli/report/html_axes.h"

#include <math.h>

#include "cli/report/html_text.h"

struct axis axis_over(double low, double high, int ticks) {
    if (!(high > low)) {
        high = low + 1;
    }
    const double rough = (high - low) / ticks;
    const double power = pow(10, floor(log10(rough)));
    const double digit = rough / power;
    const double step = power * (digit <= 1 ? 1 : digit <= 2 ? 2 : digit <= 5 ? 5 : 10);
    return (struct axis){floor(low / step) * step, ceil(high / step) * step, step};
}

double axis_x(const struct axis *axis, double value) {
    return CHART_LEFT + (value - axis->low) / (axis->high - axis->low) * (CHART_RIGHT - CHART_LEFT);
}

double axis_y(const struct axis *axis, double value) {
    return CHART_BOTTOM - (value - axis->low) / (axis->high - axis->low) * (CHART_BOTTOM - CHART_TOP);
}

static void tick_label(struct text *page, enum tick_style style, double value) {
    if (style == TICK_POWER_OF_TWO) {
        text_print(page, "2<tspan class=\"power\" dy=\"-5\">%g</tspan>", value);
    } else if (style == TICK_PERCENT) {
        text_print(page, "%g%%", value);
    } else {
        text_print(page, "%g", fabs(value) < 1e-9 ? 0 : value);
    }
}

static size_t tick_count(const struct axis *axis) {
    return (size_t)floor((axis->high - axis->low) / axis->step + 1.5);
}

static void add_axes(struct text *page, const struct axis *x, enum tick_style x_style, const char *x_label,
                     const struct axis *y, enum tick_style y_style, const char *y_label) {
    enum { LABEL_BELOW = 18, LABEL_LEFT = 8, LABEL_DOWN = 4, NAME_BELOW = 36 };
    for (size_t i = 0; i < tick_count(y); ++i) {
        const double value = y->low + (double)i * y->step;
        const double at = axis_y(y, value);
        text_print(page, "<line class=\"grid\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>", CHART_LEFT,
                   CHART_RIGHT, at, at);
        text_print(page, "<text class=\"tick right\" x=\"%d\" y=\"%.1f\">", CHART_LEFT - LABEL_LEFT,
                   at + LABEL_DOWN);
        tick_label(page, y_style, value);
        text_print(page, "</text>\n");
    }
    for (size_t i = 0; i < tick_count(x); ++i) {
        const double value = x->low + (double)i * x->step;
        const double at = axis_x(x, value);
        text_print(page, "<line class=\"mark\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\"/>", at, at,
                   CHART_BOTTOM, CHART_BOTTOM + LABEL_DOWN);
        text_print(page, "<text class=\"tick middle\" x=\"%.1f\" y=\"%d\">", at, CHART_BOTTOM + LABEL_BELOW);
        tick_label(page, x_style, value);
        text_print(page, "</text>\n");
    }
    text_print(page, "<line class=\"base\" x1=\"%d\" x2=\"%d\" y1=\"%d\" y2=\"%d\"/>", CHART_LEFT, CHART_RIGHT,
               CHART_BOTTOM, CHART_BOTTOM);
    text_print(page, "<text class=\"name middle\" x=\"%d\" y=\"%d\">%s</text>", (CHART_LEFT + CHART_RIGHT) / 2,
               CHART_BOTTOM + NAME_BELOW, x_label);
    text_print(page, "<text class=\"name middle\" transform=\"translate(14 %d) rotate(-90)\">%s</text>\n",
               (CHART_TOP + CHART_BOTTOM) / 2, y_label);
}

void chart_begin(struct text *page, const char *title, const char *about, const struct axis *x,
                 enum tick_style x_style, const char *x_label, const struct axis *y, enum tick_style y_style,
                 const char *y_label) {
    text_print(page, "<figure>\n<figcaption><h2>%s</h2><p>%s</p></figcaption>\n", title, about);
    text_print(page, "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"%s\">\n", CHART_WIDTH, CHART_HEIGHT,
               title);
    add_axes(page, x, x_style, x_label, y, y_style, y_label);
}

void legend_begin(struct text *page) { text_print(page, "</svg>\n<ul class=\"legend\">"); }

void legend_item(struct text *page, size_t colour, const char *name) {
    text_print(page, "<li><span class=\"swatch s%zu\"></span>", colour);
    html_escape(page, name);
    text_print(page, "</li>");
}

void chart_end(struct text *page) { text_print(page, "</ul>\n</figure>\n"); }
