#!/bin/sh
# A certificate for the webhook where there is no cert-manager: makes one for ten years, puts it into the Secret, and tells
# the API server to trust it. Run it again for a new one: the webhook reads it without a restart.
set -eu

namespace=llm-sidecar-system
name=llm-sidecar-webhook
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 \
    -subj "/CN=$name.$namespace.svc" \
    -addext "subjectAltName=DNS:$name.$namespace.svc,DNS:$name.$namespace.svc.cluster.local" \
    -keyout "$folder/tls.key" -out "$folder/tls.crt"

kubectl -n "$namespace" create secret tls "$name-tls" --cert "$folder/tls.crt" --key "$folder/tls.key" \
    --dry-run=client -o yaml | kubectl apply -f -
kubectl patch mutatingwebhookconfiguration infra-llm-sidecar --type json --patch \
    "[{\"op\": \"add\", \"path\": \"/webhooks/0/clientConfig/caBundle\", \"value\": \"$(base64 < "$folder/tls.crt" | tr -d '\n')\"}]"
