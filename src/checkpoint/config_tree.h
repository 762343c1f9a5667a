/* checkpoint/config_tree.h: the values of a configuration as a tree, with typed access to fields. Depends on
 * opaq/checkpoint_config.h. A value is its index in the list; -1 means absent. */
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

/* Checks that depths, kinds and keys form one value. */
enum opaq_status tree_check(const struct config_tree *tree, struct opaq_error *error);

/* The first member of a value, and the next sibling; -1 if there is none. */
int64_t tree_inside(const struct config_tree *tree, int64_t value);
int64_t tree_next(const struct config_tree *tree, int64_t value);

/* A field of an object, possibly null; -1 if it is absent or there is no object. */
int64_t tree_find(const struct config_tree *tree, int64_t object, const char *key);

/* Whether a field is absent, null, or of a kind. */
enum opaq_status tree_expect(const struct config_tree *tree, int64_t field, enum opaq_json_kind kind,
                             struct opaq_error *error);

/* A field of an object, of a kind: null counts as absent, other kinds are an error. */
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

/* Whether a list consists of these two integers. */
bool tree_is_pair(const struct config_tree *tree, int64_t list, int64_t first, int64_t second);

/* The value as JSON text, truncated with "..." if it is long. Returns `shown`. */
const char *tree_show(const struct config_tree *tree, int64_t value, char shown[SHOWN_BYTES]);

/* "an integer" */
const char *tree_kind_name(const struct config_tree *tree, int64_t value);

#endif
