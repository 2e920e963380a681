/* Scalars of a config, typed by the schema and not by their looks: "0660" is a
 * mode because it stands where a mode belongs. Only the files config*.c include
 * this.
 *
 * `what` is the key's name for the error sentence. What is wrong is reported and
 * leaves *ret as it was.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CONFIG_VALUE_H
#define BFCD_CONFIG_VALUE_H

#include "daemon/config_reader.h"

#define CONFIG_DEFAULT_SOCKET "/run/bfcd/bfcd.sock"

bool config_read_number(struct config_reader *r, const struct yamltree_node *n, const char *what,
                        uint64_t min, uint64_t max, uint64_t *ret);

/* From 1; n may be NULL. */
void config_read_count(struct config_reader *r, const struct yamltree_node *n, const char *what, uint32_t max,
                       uint32_t *ret);

/* n may be NULL. */
void config_read_duration(struct config_reader *r, const struct yamltree_node *n, const char *what,
                          uint64_t *ret_ms);

/* What a size may be where it stands. */
struct size_rule {
        const char *what;
        bool zero_allowed;
        const char *whole_name; /* what a percentage is of; NULL: none allowed */
        uint64_t whole;
        bool whole_known;
};

/* false: reported, or a percentage of what is not known. */
bool config_read_size(struct config_reader *r, const struct yamltree_node *n, const struct size_rule *rule,
                      uint64_t *ret);

/* A name, or NULL: reported. It lasts as long as the node. */
const char *config_read_name(struct config_reader *r, const struct yamltree_node *n, const char *what);

/* 0 or 1, the index of the word; -1: reported. */
int config_read_word(struct config_reader *r, const struct yamltree_node *n, const char *what,
                     const char *first, const char *second);

#define CONFIG_FAULT_BYTES 192

/* What is wrong with a socket's path, as the end of a sentence; false: nothing. */
bool config_path_fault(const char *path, size_t n_path, char *ret, size_t n_ret);

/* The absolute path of a socket; *ret is freed and replaced. */
void config_read_path(struct config_reader *r, const struct yamltree_node *n, const char *what, char **ret);

void config_read_mode(struct config_reader *r, const struct yamltree_node *n, const char *what, mode_t *ret);

bool config_all_digits(const struct yamltree_node *n);

/* A name that is not known yet is a warning only: a config may be written
 * before its users are. false: none was found. */
bool config_find_user(struct config_reader *r, const struct yamltree_node *n, uid_t *ret);
bool config_find_group(struct config_reader *r, const struct yamltree_node *n, const char *consequence,
                       gid_t *ret);

#endif
