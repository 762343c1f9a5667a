/* cli/report/html_report.c: see html_report.h. Nothing from outside comes near the style or the script. */
#include "cli/report/html_report.h"

#include <inttypes.h>
#include <math.h>

#include "cli/console/number_text.h"
#include "cli/report/html_chart.h"
#include "cli/report/html_text.h"
#include "cli/report/verify_report.h"

enum { MOST_ROWS = 20000 };

static const char style[] =
    ":root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1b1f24;--soft:#5b6571;--rule:#d9dee4;"
    "--good:#1a7f37;--bad:#c62f2f;--c0:#2f6fde;--c1:#d9730d;--c2:#1a8f5a;--c3:#b3349a;--c4:#7a5af0;--c5:#"
    "0e8fa3;"
    "--c6:#b5891a;--c7:#d1425f;--c8:#5f7d2e;--c9:#6b7280}\n"
    "@media (prefers-color-scheme:dark){:root{--page:#14171b;--card:#1d2126;--ink:#e7eaee;--soft:#9aa5b1;"
    "--rule:#363d46;--good:#4cc46f;--bad:#ff7b72;--c0:#6ea8fe;--c1:#ffa657;--c2:#56d39b;--c3:#f08bdc;--c4:#"
    "b3a1ff;"
    "--c5:#5cd0e0;--c6:#e3c05b;--c7:#ff8fa3;--c8:#a9cf6a;--c9:#a7b0ba}}\n"
    "*{box-sizing:border-box}\n"
    "body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}\n"
    "main{max-width:1120px;margin:0 auto;padding:24px 16px 64px}\n"
    "h1{font-size:24px;margin:0 0 4px}h2{font-size:17px;margin:0}p{margin:2px 0 0;color:var(--soft)}\n"
    "code{font:13px/1.5 ui-monospace,monospace;overflow-wrap:anywhere}\n"
    "figure,section{background:var(--card);border:1px solid var(--rule);border-radius:8px;margin:16px 0 0;"
    "padding:16px}\n"
    ".verdict{font-weight:600}.pass{color:var(--good)}.fail{color:var(--bad)}\n"
    "svg{display:block;width:100%;height:auto;margin-top:8px}\n"
    "svg text{fill:var(--soft);font-size:12px}.middle{text-anchor:middle}.right{text-anchor:end}"
    "svg .power{font-size:9px}\n"
    ".grid{stroke:var(--rule);stroke-width:1}.base,.mark{stroke:var(--soft);stroke-width:1}\n"
    ".limit{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:6 4}\n"
    ".s0{--c:var(--c0)}.s1{--c:var(--c1)}.s2{--c:var(--c2)}.s3{--c:var(--c3)}.s4{--c:var(--c4)}"
    ".s5{--c:var(--c5)}.s6{--c:var(--c6)}.s7{--c:var(--c7)}.s8{--c:var(--c8)}.s9{--c:var(--c9)}\n"
    ".series polyline{fill:none;stroke:var(--c);stroke-width:1.75}.series circle,rect{fill:var(--c)}\n"
    ".series circle.fails{fill:var(--card);stroke:var(--bad);stroke-width:2}\n"
    ".series:hover polyline{stroke-width:3}svg:hover .series:not(:hover){opacity:.45}\n"
    ".legend{display:flex;flex-wrap:wrap;gap:4px 18px;list-style:none;margin:8px 0 "
    "0;padding:0;font-size:13px}\n"
    ".swatch{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;background:var(--c)"
    "}\n"
    ".scroll{overflow-x:auto;margin-top:12px}\n"
    "table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}\n"
    "th,td{padding:5px 10px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}\n"
    "th{color:var(--soft);font-weight:600}th.left,td.left{text-align:left}\n"
    "#weights th{padding:0}#weights th button{all:unset;cursor:pointer;padding:5px 10px}"
    "#weights th button:focus-visible{outline:2px solid var(--c0)}\n"
    "th[aria-sort=ascending] button::after{content:' \\2191'}th[aria-sort=descending] button::after{content:' "
    "\\2193'}\n"
    "input{font:inherit;color:inherit;background:var(--page);border:1px solid var(--rule);border-radius:6px;"
    "padding:6px 10px;width:min(420px,100%);margin-top:10px}\n"
    "[hidden]{display:none}\n";

static const char script[] =
    "(function () {\n"
    "  'use strict';\n"
    "  var table = document.getElementById('weights');\n"
    "  var body = table.tBodies[0];\n"
    "  var heads = Array.prototype.slice.call(table.tHead.rows[0].cells);\n"
    "  var rows = Array.prototype.slice.call(body.rows);\n"
    "  function key(row, column) {\n"
    "    var cell = row.cells[column];\n"
    "    return cell.hasAttribute('data-v') ? Number(cell.getAttribute('data-v')) : cell.textContent;\n"
    "  }\n"
    "  function order(a, b) {\n"
    "    if (typeof a === 'number' && typeof b === 'number') { return a - b; }\n"
    "    return a < b ? -1 : a > b ? 1 : 0;\n"
    "  }\n"
    "  heads.forEach(function (head, column) {\n"
    "    head.firstElementChild.addEventListener('click', function () {\n"
    "      var down = head.getAttribute('aria-sort') === 'ascending';\n"
    "      heads.forEach(function (other) { other.removeAttribute('aria-sort'); });\n"
    "      head.setAttribute('aria-sort', down ? 'descending' : 'ascending');\n"
    "      rows.sort(function (a, b) { return (down ? -1 : 1) * order(key(a, column), key(b, column)); });\n"
    "      rows.forEach(function (row) { body.appendChild(row); });\n"
    "    });\n"
    "  });\n"
    "  var search = document.getElementById('search');\n"
    "  search.addEventListener('input', function () {\n"
    "    var wanted = search.value.toLowerCase();\n"
    "    rows.forEach(function (row) { row.hidden = row.textContent.toLowerCase().indexOf(wanted) < 0; });\n"
    "  });\n"
    "}());\n";

static void add_head(const struct weight_pairs *pairs, const struct judgement *judgement, struct text *page) {
    text_print(page, "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
                     "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
                     "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
                     "'unsafe-inline'; script-src 'unsafe-inline'\">\n<title>opaq verify: ");
    html_escape(page, pairs->quantized->model.path);
    text_print(
        page, "</title>\n<style>\n%s</style>\n</head>\n<body>\n<main>\n<h1>Quantization report</h1>\n<p><code>",
        style);
    html_escape(page, pairs->quantized->model.path);
    text_print(page, "</code> compared with <code>");
    html_escape(page, pairs->original->model.path);
    text_print(page, "</code></p>\n");
    if (judgement->failed == 0) {
        text_print(page, "<p class=\"verdict pass\">All %zu weights pass.</p>\n", judgement->count);
    } else {
        text_print(page, "<p class=\"verdict fail\">%zu of %zu weights fail.</p>\n", judgement->failed,
                   judgement->count);
    }
}

static void add_kinds(const struct judgement *judgement, struct text *page) {
    text_print(
        page,
        "<section>\n<h2>By kind</h2>\n<div class=\"scroll\"><table>\n<thead><tr><th class=\"left\">kind</th>"
        "<th>weights</th><th>fail</th><th>least dB</th><th>median dB</th><th>required</th>"
        "<th>least cosine</th><th>required</th></tr></thead>\n<tbody>\n");
    for (size_t i = 0; i < judgement->kind_count; ++i) {
        const struct kind_summary *const kind = &judgement->kinds[i];
        char least[NUMBER_TEXT_BYTES];
        char median[NUMBER_TEXT_BYTES];
        text_print(page, "<tr><td class=\"left\">%s</td><td>%zu</td><td%s>%zu</td>", kind->kind, kind->count,
                   kind->failed == 0 ? "" : " class=\"fail\"", kind->failed);
        if (kind->measured != 0) {
            text_print(page, "<td>%s</td><td>%s</td>", number_decibels(kind->least_sqnr, least),
                       number_decibels(kind->median_sqnr, median));
        } else {
            text_print(page, "<td>-</td><td>-</td>");
        }
        if (kind->is_quantized) {
            text_print(page, "<td>%g</td><td>%.6f</td><td>%g</td></tr>\n", kind->limit.sqnr, kind->least_cosine,
                       kind->limit.cosine);
        } else {
            text_print(page, "<td>equal</td><td>-</td><td>equal</td></tr>\n");
        }
    }
    text_print(page, "</tbody>\n</table></div>\n</section>\n");
}

/* A cell whose value sorts as a number; what is infinite or missing goes to the upper end. `digits` are those after the
 * point, or all that count if `is_short`. */
static void add_number(struct text *page, bool is_there, int digits, bool is_short, double value) {
    const double largest = 1e308;
    text_print(page, "<td data-v=\"%.9g\">", is_there ? fmax(-largest, fmin(value, largest)) : largest);
    if (!is_there) {
        text_print(page, "-");
    } else if (!isfinite(value)) {
        text_print(page, "%s", value > 0 ? "inf" : "-inf");
    } else {
        text_print(page, is_short ? "%.*g" : "%.*f", digits, value);
    }
    text_print(page, "</td>");
}

static void add_row(const struct judged *judged, struct text *page) {
    const struct comparison *const comparison = judged->comparison;
    const struct weight_error *const error = &comparison->error;
    const bool has_error = comparison->has_error;
    char place[80];
    text_print(page, "<tr><td class=\"left\"><code>");
    html_escape(page, comparison->pair->name);
    text_print(page, "</code></td><td class=\"left\">%s</td><td class=\"left %s\">%s</td>", judged->kind,
               judged->verdict == VERDICT_PASS ? "pass" : "fail", verdict_name(judged->verdict));
    add_number(page, has_error, 2, false, error->sqnr);
    add_number(page, has_error, 6, false, error->cosine);
    add_number(page, has_error, 3, true, error->relative);
    add_number(page, has_error, 3, true, error->largest);
    text_print(page, "<td>%s</td>", error_place(comparison, place, sizeof place));
    text_print(page, "<td data-v=\"%" PRIu64 "\">%" PRIu64 "</td></tr>\n", pair_elements(comparison->pair),
               pair_elements(comparison->pair));
}

static void add_weights(const struct judgement *judgement, struct text *page) {
    static const char *const columns[] = {"weight",         "kind",          "verdict", "SQNR dB", "cosine",
                                          "relative error", "largest error", "at",      "elements"};
    const size_t shown = judgement->count < MOST_ROWS ? judgement->count : MOST_ROWS;
    text_print(page, "<section>\n<h2>Weights</h2>\n<p>The worst first");
    if (shown < judgement->count) {
        text_print(page, ": %zu of %zu", shown, judgement->count);
    }
    text_print(
        page, ". A click on a heading sorts.</p>\n<input id=\"search\" type=\"search\" placeholder=\"Search\" "
              "aria-label=\"Search in the table\">\n<div class=\"scroll\"><table id=\"weights\">\n<thead><tr>");
    for (size_t i = 0; i < sizeof columns / sizeof columns[0]; ++i) {
        text_print(page, "<th%s><button type=\"button\">%s</button></th>", i < 3 ? " class=\"left\"" : "",
                   columns[i]);
    }
    text_print(page, "</tr></thead>\n<tbody>\n");
    for (size_t i = 0; i < shown; ++i) {
        add_row(&judgement->items[i], page);
    }
    text_print(page, "</tbody>\n</table></div>\n</section>\n");
}

void html_report(const struct weight_pairs *pairs, const struct judgement *judgement, struct text *page) {
    add_head(pairs, judgement, page);
    add_kinds(judgement, page);
    chart_layers(judgement, page);
    chart_sqnr(judgement, page);
    chart_errors(judgement, page);
    add_weights(judgement, page);
    text_print(page, "</main>\n<script>\n%s</script>\n</body>\n</html>\n", script);
}
