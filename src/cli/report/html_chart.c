/* cli/report/html_chart.c: see html_chart.h. */
#include "cli/report/html_chart.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/report/html_axes.h"
#include "cli/report/html_text.h"

/* What can be drawn: a quantized weight whose error is finite and not nothing. */
static bool is_drawn(const struct judged *judged) {
    const struct weight_pair *const pair = judged->comparison->pair;
    return judged->comparison->has_error && pair->quantized.weight->row != NULL &&
           isfinite(judged->comparison->error.sqnr);
}

static double sqnr_of(const struct judged *judged) { return judged->comparison->error.sqnr; }

/* The range of SQNR, thresholds among them; false if there is nothing to draw. */
static bool sqnr_range(const struct judgement *judgement, double *low, double *high) {
    bool is_any = false;
    for (size_t i = 0; i < judgement->count; ++i) {
        const struct judged *const judged = &judgement->items[i];
        if (is_drawn(judged)) {
            *low = is_any ? fmin(*low, sqnr_of(judged)) : sqnr_of(judged);
            *high = is_any ? fmax(*high, sqnr_of(judged)) : sqnr_of(judged);
            is_any = true;
        }
    }
    for (size_t i = 0; i < judgement->kind_count && is_any; ++i) {
        if (judgement->kinds[i].is_quantized) {
            *low = fmin(*low, judgement->kinds[i].limit.sqnr);
            *high = fmax(*high, judgement->kinds[i].limit.sqnr);
        }
    }
    *low -= 1;
    *high += 1;
    return is_any;
}

/* The colour of a kind: its place among the quantized ones. */
static size_t kind_colour(const struct judgement *judgement, const char *kind) {
    size_t at = 0;
    while (at < judgement->kind_count && strcmp(judgement->kinds[at].kind, kind) != 0) {
        ++at;
    }
    return at % CHART_COLOURS;
}

/* ---- by layer ---- */

/* The worst weight of a sort of module in a layer. */
struct point {
    char *module; /* "q_proj" */
    int64_t layer;
    const struct judged *judged;
};

static bool is_number(const char *text, size_t length) {
    enum { MOST_DIGITS = 9 };
    for (size_t i = 0; i < length; ++i) {
        if (!isdigit((unsigned char)text[i])) {
            return false;
        }
    }
    return length != 0 && length <= MOST_DIGITS;
}

/* The first number between dots, and the last part that is neither a number nor "weight". False without a number. */
static bool split_name(const char *name, struct point *point) {
    const char *module = name;
    size_t module_length = strcspn(name, ".");
    bool has_layer = false;
    for (const char *part = name;;) {
        const size_t length = strcspn(part, ".");
        if (is_number(part, length)) {
            point->layer = has_layer ? point->layer : strtoll(part, NULL, 10);
            has_layer = true;
        } else if (length != 0 && (length != strlen("weight") || strncmp(part, "weight", length) != 0)) {
            module = part;
            module_length = length;
        }
        if (part[length] == '\0') {
            break;
        }
        part += length + 1;
    }
    if (has_layer) {
        point->module = copy_text(module, module_length);
    }
    return has_layer;
}

static int compare_points(const void *first, const void *second) {
    const struct point *const a = first;
    const struct point *const b = second;
    const int order = strcmp(a->module, b->module);
    if (order != 0 || a->layer != b->layer) {
        return order != 0 ? order : a->layer < b->layer ? -1 : 1;
    }
    return (sqnr_of(a->judged) > sqnr_of(b->judged)) - (sqnr_of(a->judged) < sqnr_of(b->judged));
}

/* Sorted by module, then layer; only the worst of each. */
static struct point *make_points(const struct judgement *judgement, size_t *count) {
    struct point *const points = alloc_array(judgement->count, sizeof *points);
    size_t all = 0;
    for (size_t i = 0; i < judgement->count; ++i) {
        points[all].judged = &judgement->items[i];
        all += is_drawn(points[all].judged) &&
               split_name(points[all].judged->comparison->pair->name, &points[all]);
    }
    if (all != 0) {
        qsort(points, all, sizeof *points, compare_points);
    }
    *count = 0;
    for (size_t i = 0; i < all; ++i) {
        const struct point *const last = *count == 0 ? NULL : &points[*count - 1];
        if (last != NULL && strcmp(last->module, points[i].module) == 0 && last->layer == points[i].layer) {
            free(points[i].module);
        } else {
            points[(*count)++] = points[i];
        }
    }
    return points;
}

/* The points of one module: a line, and a circle with a tooltip for each. Returns how many there were. */
static size_t add_series(const struct point *points, size_t count, const struct axis *x, const struct axis *y,
                         size_t colour, struct text *page) {
    size_t length = 0;
    text_print(page, "<g class=\"series s%zu\"><polyline points=\"", colour);
    for (; length < count && strcmp(points[length].module, points[0].module) == 0; ++length) {
        text_print(page, "%s%.1f,%.1f", length == 0 ? "" : " ", axis_x(x, (double)points[length].layer),
                   axis_y(y, sqnr_of(points[length].judged)));
    }
    text_print(page, "\"/>\n");
    for (size_t i = 0; i < length; ++i) {
        const struct comparison *const comparison = points[i].judged->comparison;
        text_print(page, "<circle%s cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\"><title>",
                   points[i].judged->verdict == VERDICT_PASS ? "" : " class=\"fails\"",
                   axis_x(x, (double)points[i].layer), axis_y(y, comparison->error.sqnr));
        html_escape(page, comparison->pair->name);
        text_print(page, "\n%s, %.2f dB, cosine %.6f</title></circle>\n", points[i].judged->kind,
                   comparison->error.sqnr, comparison->error.cosine);
    }
    text_print(page, "</g>\n");
    return length;
}

static void add_level_limits(const struct judgement *judgement, const struct axis *y, struct text *page) {
    for (size_t i = 0; i < judgement->kind_count; ++i) {
        const struct kind_summary *const kind = &judgement->kinds[i];
        if (kind->is_quantized) {
            const double at = axis_y(y, kind->limit.sqnr);
            text_print(page,
                       "<line class=\"limit\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"><title>%s: at least "
                       "%g dB</title></line>\n",
                       CHART_LEFT, CHART_RIGHT, at, at, kind->kind, kind->limit.sqnr);
        }
    }
}

void chart_layers(const struct judgement *judgement, struct text *page) {
    enum { LAYER_TICKS = 16, SQNR_TICKS = 6 };
    double low = 0;
    double high = 0;
    size_t count = 0;
    struct point *const points = make_points(judgement, &count);
    if (count != 0 && sqnr_range(judgement, &low, &high)) {
        int64_t last = 1;
        for (size_t i = 0; i < count; ++i) {
            last = points[i].layer > last ? points[i].layer : last;
        }
        struct axis x = axis_over(0, (double)last, LAYER_TICKS);
        x.step = fmax(x.step, 1);
        x.high = fmax(x.step, ceil((double)last / x.step) * x.step);
        const struct axis y = axis_over(low, high, SQNR_TICKS);
        chart_begin(
            page, "SQNR by layer",
            "The worst weight of each sort of module in each layer. The dashed line is what is required.", &x,
            TICK_NUMBER, "layer", &y, TICK_NUMBER, "dB");
        add_level_limits(judgement, &y, page);
        size_t series = 0;
        for (size_t i = 0; i < count; ++series) {
            i += add_series(points + i, count - i, &x, &y, series % CHART_COLOURS, page);
        }
        legend_begin(page);
        series = 0;
        for (size_t i = 0; i < count; ++i) {
            if (i == 0 || strcmp(points[i - 1].module, points[i].module) != 0) {
                legend_item(page, series++ % CHART_COLOURS, points[i].module);
            }
        }
        chart_end(page);
    }
    for (size_t i = 0; i < count; ++i) {
        free(points[i].module);
    }
    free(points);
}

/* ---- how many weights have which SQNR ---- */

enum { MOST_BARS = 48 };

struct bars {
    struct axis x;
    double width; /* of a bar, in dB */
    size_t count;
    size_t *heights; /* [kind][bar] */
    size_t tallest;  /* of all kinds together */
};

static void count_bars(const struct judgement *judgement, struct bars *bars) {
    bars->heights = alloc_array(judgement->kind_count * bars->count, sizeof *bars->heights);
    size_t *const totals = alloc_array(bars->count, sizeof *totals);
    for (size_t i = 0; i < judgement->count; ++i) {
        const struct judged *const judged = &judgement->items[i];
        if (!is_drawn(judged)) {
            continue;
        }
        size_t kind = 0;
        while (strcmp(judgement->kinds[kind].kind, judged->kind) != 0) {
            ++kind;
        }
        const double place = floor((sqnr_of(judged) - bars->x.low) / bars->width);
        const size_t bar = place < 0 ? 0 : place >= (double)bars->count ? bars->count - 1 : (size_t)place;
        ++bars->heights[kind * bars->count + bar];
        bars->tallest = ++totals[bar] > bars->tallest ? totals[bar] : bars->tallest;
    }
    free(totals);
}

static void add_bars(const struct judgement *judgement, const struct bars *bars, const struct axis *y,
                     struct text *page) {
    for (size_t bar = 0; bar < bars->count; ++bar) {
        const double from = bars->x.low + (double)bar * bars->width;
        size_t below = 0;
        for (size_t kind = 0; kind < judgement->kind_count; ++kind) {
            const size_t height = bars->heights[kind * bars->count + bar];
            if (height == 0) {
                continue;
            }
            const double top = axis_y(y, (double)(below + height));
            text_print(
                page,
                "<rect class=\"s%zu\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"><title>%s: %zu "
                "with %g to %g dB</title></rect>\n",
                kind % CHART_COLOURS, axis_x(&bars->x, from) + 0.5, top,
                axis_x(&bars->x, from + bars->width) - axis_x(&bars->x, from) - 1,
                axis_y(y, (double)below) - top, judgement->kinds[kind].kind, height, from, from + bars->width);
            below += height;
        }
    }
}

static void add_upright_limits(const struct judgement *judgement, const struct axis *x, struct text *page) {
    for (size_t i = 0; i < judgement->kind_count; ++i) {
        const struct kind_summary *const kind = &judgement->kinds[i];
        if (kind->is_quantized) {
            const double at = axis_x(x, kind->limit.sqnr);
            text_print(page,
                       "<line class=\"limit\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\"><title>%s: at least "
                       "%g dB</title></line>\n",
                       at, at, CHART_TOP, CHART_BOTTOM, kind->kind, kind->limit.sqnr);
        }
    }
}

static void add_kind_legend(const struct judgement *judgement, struct text *page) {
    legend_begin(page);
    for (size_t i = 0; i < judgement->kind_count; ++i) {
        if (judgement->kinds[i].is_quantized) {
            legend_item(page, kind_colour(judgement, judgement->kinds[i].kind), judgement->kinds[i].kind);
        }
    }
    chart_end(page);
}

void chart_sqnr(const struct judgement *judgement, struct text *page) {
    enum { SQNR_TICKS = 12, COUNT_TICKS = 5 };
    double low = 0;
    double high = 0;
    if (!sqnr_range(judgement, &low, &high)) {
        return;
    }
    struct bars bars = {.x = axis_over(low, high, SQNR_TICKS)};
    bars.width = axis_over(low, high, MOST_BARS).step;
    bars.count = (size_t)ceil((bars.x.high - bars.x.low) / bars.width - 1e-6);
    count_bars(judgement, &bars);
    struct axis y = axis_over(0, (double)bars.tallest, COUNT_TICKS);
    if (y.step < 1) { /* weights come whole */
        y = (struct axis){0, fmax(1, (double)bars.tallest), 1};
    }
    chart_begin(page, "Weights by SQNR",
                "How many weights have which signal-to-quantization-noise ratio. Dashed: what is required.",
                &bars.x, TICK_NUMBER, "dB", &y, TICK_NUMBER, "weights");
    add_bars(judgement, &bars, &y, page);
    add_upright_limits(judgement, &bars.x, page);
    add_kind_legend(judgement, page);
    free(bars.heights);
}

/* ---- how errors are distributed ---- */

static double share(const struct kind_summary *kind, size_t bin) {
    uint64_t all = kind->exact;
    for (size_t i = 0; i < ERROR_BINS; ++i) {
        all += kind->histogram[i];
    }
    return all == 0 ? 0 : 100 * (double)kind->histogram[bin] / (double)all;
}

/* Half octaves that matter, and the largest share; false if there are none. */
static bool error_range(const struct judgement *judgement, size_t *first, size_t *last, double *most) {
    const double least_share = 0.1; /* percent */
    *first = ERROR_BINS;
    *last = 0;
    *most = 0;
    for (size_t i = 0; i < judgement->kind_count; ++i) {
        for (size_t bin = 0; bin < ERROR_BINS && judgement->kinds[i].is_quantized; ++bin) {
            const double found = share(&judgement->kinds[i], bin);
            if (found >= least_share) {
                *first = bin < *first ? bin : *first;
                *last = bin > *last ? bin : *last;
                *most = fmax(*most, found);
            }
        }
    }
    return *first <= *last;
}

static double bin_octave(size_t bin) { return ((double)bin + 0.5) / 2 - ERROR_OCTAVES; }

static void add_error_line(const struct judgement *judgement, size_t kind, size_t first, size_t last,
                           const struct axis *x, const struct axis *y, struct text *page) {
    const struct kind_summary *const summary = &judgement->kinds[kind];
    text_print(page, "<g class=\"series s%zu\"><polyline points=\"", kind % CHART_COLOURS);
    for (size_t bin = first; bin <= last; ++bin) {
        text_print(page, "%s%.1f,%.1f", bin == first ? "" : " ", axis_x(x, bin_octave(bin)),
                   axis_y(y, share(summary, bin)));
    }
    text_print(page, "\"/>\n");
    for (size_t bin = first; bin <= last; ++bin) {
        text_print(
            page,
            "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2.5\"><title>%s: %.2f%% of the errors are about %.3g of "
            "the rms</title></circle>\n",
            axis_x(x, bin_octave(bin)), axis_y(y, share(summary, bin)), summary->kind, share(summary, bin),
            exp2(bin_octave(bin)));
    }
    text_print(page, "</g>\n");
}

void chart_errors(const struct judgement *judgement, struct text *page) {
    enum { SHARE_TICKS = 5 };
    size_t first = 0;
    size_t last = 0;
    double most = 0;
    if (!error_range(judgement, &first, &last, &most)) {
        return;
    }
    const struct axis x = {floor(bin_octave(first)), ceil(bin_octave(last)), 1};
    const struct axis y = axis_over(0, most, SHARE_TICKS);
    chart_begin(
        page, "Errors of single elements",
        "The share of elements whose error is so large, relative to the root mean square of their weight, "
        "in half octaves.",
        &x, TICK_POWER_OF_TWO, "|error| / rms", &y, TICK_PERCENT, "share");
    for (size_t i = 0; i < judgement->kind_count; ++i) {
        if (judgement->kinds[i].is_quantized) {
            add_error_line(judgement, i, first, last, &x, &y, page);
        }
    }
    add_kind_legend(judgement, page);
}
