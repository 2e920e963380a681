/* See host_defines.h. SPDX-License-Identifier: Apache-2.0 */
#pragma once
