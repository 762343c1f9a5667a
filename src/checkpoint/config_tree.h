/* checkpoint/config_tree.h: the values of a configuration as a tree that is asked for fields of a kind. Depends on
 * opaq/checkpoint_config.h. A value is the number of its place in the list; -1 is one that is absent. */
#ifndef OPAQ_CHECKPOINT_CONFIG_TREE_H
#define OPAQ_CHECKPOINT_CONFIG_TREE_H

#include <stdbool.h>
#include <stddef.h>

#include "opaq/checkpoint_config.h"

struct config_tree {
    const struct opaq_config_value *values;
    int64_t count;
};

enum { SHOWN_BYTES = 96 };

/* Whether depths, kinds and keys are those of one value. */
enum opaq_status tree_check(const struct config_tree *tree, struct opaq_error *error);

/* The first value inside of one, and the next beside one; -1 if there is none. */
int64_t tree_inside(const struct config_tree *tree, int64_t value);
int64_t tree_next(const struct config_tree *tree, int64_t value);

/* A field of an object, null or not; -1 if it is absent or there is no object. */
int64_t tree_find(const struct config_tree *tree, int64_t object, const char *key);

/* Whether a field that was found is absent, null, or of a kind. */
enum opaq_status tree_expect(const struct config_tree *tree, int64_t field, enum opaq_json_kind kind,
                             struct opaq_error *error);

/* A field of an object, of a kind: null is absent, other kinds are an error. */
enum opaq_status tree_field(const struct config_tree *tree, int64_t object, const char *key,
                            enum opaq_json_kind kind, int64_t *value, struct opaq_error *error);

/* The field's string, NULL if it is absent; its integer or boolean. */
enum opaq_status tree_string(const struct config_tree *tree, int64_t object, const char *key,
                             const char **string, struct opaq_error *error);
enum opaq_status tree_integer(const struct config_tree *tree, int64_t object, const char *key,
                              enum opaq_json_kind kind, int64_t absent, int64_t *integer,
                              struct opaq_error *error);

/* The field's list, all of strings. */
enum opaq_status tree_strings(const struct config_tree *tree, int64_t object, const char *key, int64_t *list,
                              struct opaq_error *error);

/* Neither absent, null, false, 0 nor empty. */
bool tree_holds(const struct config_tree *tree, int64_t value);

/* Whether a list is of these two integers. */
bool tree_is_pair(const struct config_tree *tree, int64_t list, int64_t first, int64_t second);

/* As JSON writes it, cut with "..." where it is long. Returns `shown`. */
const char *tree_show(const struct config_tree *tree, int64_t value, char shown[SHOWN_BYTES]);

/* "an integer" */
const char *tree_kind_name(const struct config_tree *tree, int64_t value);

#endif
