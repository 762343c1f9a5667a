/* cli/report/verify_page.c: the HTML page of a judgement: fills the two markers of the template verify_report.html, the
 * JSON block that its script draws and the table for browsers without JavaScript. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "cli/console/json_output.h"
#include "cli/console/number_text.h"
#include "cli/console/terminal.h"
#include "cli/report/verify_report.h"

enum { MOST_ROWS = 20000 }; /* of the table without JavaScript */

/* Adds `text` as HTML text, in which characters that terminals and browsers interpret become '?'. */
static void add_escaped(struct text *page, const char *text) {
    static const char special[] = "&<>\"'";
    static const char *const entities[] = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
    while (*text != '\0') {
        size_t skipped = 0;
        const size_t bytes = shown_length(text, &skipped);
        const char *const found = strchr(special, *text);
        if (found != NULL) {
            text_print(page, "%s", entities[found - special]);
        } else {
            text_add(page, bytes == 0 ? "?" : text, bytes == 0 ? 1 : bytes);
        }
        text += skipped;
    }
}

/* In JSON these characters occur in strings only, so they can be written as escapes: no string can then end the script
 * element ("</script>") or begin a comment ("<!--") in it. */
static void add_json(struct text *page, const char *json, size_t length) {
    for (size_t done = 0; done < length;) {
        const size_t clean = strcspn(json + done, "<>&");
        text_add(page, json + done, clean);
        done += clean;
        if (done < length) {
            text_print(page, "\\u%04x", (unsigned)json[done]);
            ++done;
        }
    }
}

static void add_table(const struct weight_pairs *pairs, const struct judgement *judgement, struct text *page) {
    const size_t shown = judgement->count < MOST_ROWS ? judgement->count : MOST_ROWS;
    text_print(page, "<p><code>");
    add_escaped(page, pairs->quantized->model.path);
    text_print(page, "</code> compared with <code>");
    add_escaped(page, pairs->original->model.path);
    text_print(page,
               "</code></p>\n<p>%zu of %zu weights fail. The worst %zu are shown; charts need JavaScript.</p>\n"
               "<table>\n<tr><th class=\"left\">weight</th><th class=\"left\">kind</th>"
               "<th class=\"left\">verdict</th><th>SQNR dB</th><th>cosine</th><th>size</th>"
               "<th>bits per weight</th></tr>\n",
               judgement->failed, judgement->count, shown);
    for (size_t i = 0; i < shown; ++i) {
        const struct judged *const judged = &judgement->items[i];
        const struct weight_error *const error = &judged->comparison->error;
        text_print(page, "<tr><td class=\"left\"><code>");
        add_escaped(page, judged->comparison->pair->name);
        text_print(page, "</code></td><td class=\"left\">%s</td><td class=\"left %s\">%s</td>", judged->kind,
                   judged->verdict == VERDICT_PASS ? "pass" : "fail", verdict_name(judged->verdict));
        if (judged->comparison->has_error) {
            text_print(page, "<td>%s</td><td>%.6f</td>", decibel_text(error->sqnr).text, error->cosine);
        } else {
            text_print(page, "<td>-</td><td>-</td>");
        }
        const uint64_t bytes = pair_bytes(judged->comparison->pair); /* 0: the weight is missing */
        const uint64_t elements = bytes == 0 ? 0 : pair_elements(judged->comparison->pair);
        text_print(page, "<td>%s</td><td>%s</td></tr>\n", size_text(bytes).text,
                   bits_text(bytes, elements).text);
    }
    text_print(page, "</table>\n");
}

/* Adds the template up to a marker and returns what follows the marker. */
static const char *add_until(struct text *page, const char *template, const char *marker) {
    const char *const end = strstr(template, marker);
    assert(end != NULL);
    text_add(page, template, (size_t)(end - template));
    return end + strlen(marker);
}

bool verify_page(const struct command_call *call, const struct weight_pairs *pairs,
                 const struct judgement *judgement, struct text *page) {
    size_t length = 0;
    char *const json = json_print(call, verify_json(pairs, judgement), false, &length);
    if (json == NULL) {
        return false;
    }
    const char *rest = add_until(page, verify_report_html, "@TABLE@\n");
    add_table(pairs, judgement, page);
    rest = add_until(page, rest, "@JSON@");
    add_json(page, json, length);
    text_print(page, "%s", rest);
    free(json);
    return true;
}
