"""The sidecar in other people's pods: what is added to a pod, what is changed in it, and how all of that is taken back.

A pure row: plain objects (what YAML or JSON decode to) in, plain objects and words out. The command `sidecar inject`,
the webhook, Istio's template, the chart and the manifests all have the container from `sidecar.inject.container`.
"""
